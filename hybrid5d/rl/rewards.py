"""Rewards of responses, scored in worker processes with a time limit: by math-verify, or by a function of one's own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from hybrid5d.errors import ConfigError, ConfigErrors, DataError

_WORKER = Path(__file__).with_name("reward_worker.py")
_START_LIMIT = 120.0  # seconds until a worker has imported what it needs
_NAMED = 8  # rows that an error names


@dataclass(frozen=True)
class RewardOptions:
    """What a response is worth.

    Attributes:
        function: `path/file.py:name` of one's own; None: math-verify on the row's `answer_key`.
        scale: math: right is +scale, wrong is -scale.
        answer_key: field of the row with the right answer, a value or a list of which any counts.
        timeout: seconds that a row may take; num_workers: processes.
        on_error: what a row counts that raises, hangs or gives no number; None: that ends the job.
    """

    function: str | None = None
    scale: float = 1.0
    answer_key: str = "answer"
    timeout: float = 10.0
    num_workers: int = 2
    on_error: float | None = None


@dataclass(frozen=True)
class Scores:
    """One number a response, fp32 [n], and what went wrong: `row 5: ZeroDivisionError: ...`."""

    values: np.ndarray
    errors: tuple[str, ...]


def answers_of(row: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The right answers of a row as text.

    Raises:
        DataError: none, or an empty one.
    """
    value = row.get(key)
    answers = tuple(
        "" if v is None else str(v).strip() for v in (value if isinstance(value, list | tuple) else [value])
    )
    if not answers or not all(answers):
        raise DataError(f"data.answer_key {key!r}: {value!r} is no answer")
    return answers


class _Worker:
    """A scoring process and the pipe to it."""

    def __init__(self, function: str | None):
        path, _, name = (function or "").rpartition(":")
        self.connection, theirs = Pipe()
        command = [sys.executable, str(_WORKER), str(theirs.fileno()), *((path, name) if function else ())]
        with theirs:
            fds, env = (theirs.fileno(),), {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(command, pass_fds=fds, env=env, stdin=subprocess.DEVNULL)
        self.rows: list[int] = []  # what it works on
        self.deadline = 0.0

    def wait_ready(self) -> tuple[str, Any]:
        """`ready` and whether it scores lists, or `error` and why it cannot score."""
        if not self.connection.poll(_START_LIMIT):
            return "error", f"not loaded within {_START_LIMIT:g} s"
        return self.answer()

    def answer(self) -> tuple[str, Any]:
        try:
            kind, value = self.connection.recv()
            return kind, value
        except (EOFError, OSError):
            self.close()
            return "error", f"its process ended with code {self.process.returncode}"

    def close(self, *, kill: bool = False) -> None:
        """End the process: by the end of its pipe, which it obeys at once, or by force."""
        self.connection.close()
        try:
            if not kill:
                self.process.wait(2)
        except subprocess.TimeoutExpired:
            kill = True
        if kill:
            self.process.kill()
            self.process.wait()


class Scorer:
    """Scores responses until it is closed; a context manager.

    Raises:
        ConfigErrors: math-verify or the function cannot be loaded.
    """

    def __init__(self, options: RewardOptions):
        self.options = options
        self.workers = [_Worker(options.function) for _ in range(options.num_workers)]
        self.lists = False  # whether the function takes lists
        for worker in list(self.workers):
            self.lists = self._await(worker)

    def __enter__(self) -> Scorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes."""
        for worker in self.workers:
            worker.close()
        self.workers = []

    def _await(self, worker: _Worker) -> bool:
        kind, value = worker.wait_ready()
        if kind == "ready":
            return bool(value)
        self.close()
        function = self.options.function
        if function is None:
            error = ConfigError("reward.reward_type", "math", value, "pip install 'hybrid5d[rl]'")
        else:
            error = ConfigError("reward.function", function, value, "name a Python file and a function in it")
        raise ConfigErrors([error])

    def score(self, prompts: Sequence[str], responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Scores:
        """A reward for each response, in order. `rows`: the data's records.

        A worker that hangs is killed and replaced; rows that wait for a worker take no time. A math answer that takes
        too long is wrong.

        Raises:
            DataError: rows that raised, hung or gave no number, where `on_error` is None; a row without an answer.
        """
        math = self.options.function is None
        third: list[Any] = [answers_of(row, self.options.answer_key) for row in rows] if math else list(rows)
        columns = (list(prompts), list(responses), third)
        found, errors = self._run(columns, len(responses))
        if math:
            values = [self.options.scale * (1.0 if found.get(i, 0.0) else -1.0) for i in range(len(responses))]
        else:
            fallback = self.options.on_error
            if errors and fallback is None:
                more = f"\n... and {len(errors) - _NAMED} more" if len(errors) > _NAMED else ""
                named = "\n".join(f"reward.function: {text}" for text in errors[:_NAMED])
                raise DataError(
                    f"{named}{more}. Fix: the function, or reward.on_error: a number that such a row counts"
                )
            values = [found.get(i, 0.0 if fallback is None else fallback) for i in range(len(responses))]
        return Scores(np.array(values, dtype=np.float32), tuple(errors))

    def _run(self, columns: tuple[list[Any], ...], count: int) -> tuple[dict[int, float], list[str]]:
        """Numbers by row, and the errors in the order of rows."""
        size = max(1, -(-count // len(self.workers))) if self.lists else 1
        waiting = deque(list(range(at, min(at + size, count))) for at in range(0, count, size))
        found: dict[int, float] = {}
        errors: dict[int, str] = {}
        while waiting or any(w.rows for w in self.workers):
            for worker in self.workers:
                if waiting and not worker.rows:
                    self._give(worker, waiting.popleft(), columns)
            busy = {w.connection: w for w in self.workers if w.rows}
            left = min(w.deadline for w in busy.values()) - time.monotonic()
            ready = wait(list(busy), max(left, 0.0))
            for connection, worker in busy.items():
                if connection in ready:
                    kind, value = worker.answer()
                elif time.monotonic() >= worker.deadline:
                    kind, value = "error", f"no result within {self.options.timeout:g} s"
                else:
                    continue
                if kind == "scores":
                    found.update(zip(worker.rows, value))
                else:
                    errors.update((row, f"row {row}: {value}") for row in worker.rows)
                worker.rows = []
                if connection not in ready or connection.closed:
                    self._replace(worker)
        return found, [errors[row] for row in sorted(errors)]

    def _give(self, worker: _Worker, rows: list[int], columns: tuple[list[Any], ...]) -> None:
        worker.rows = rows
        worker.deadline = time.monotonic() + self.options.timeout * len(rows)
        with contextlib.suppress(OSError):  # it is gone: its answer says so
            worker.connection.send(tuple([column[i] for i in rows] for column in columns))

    def _replace(self, worker: _Worker) -> None:
        worker.close(kill=True)
        fresh = _Worker(self.options.function)
        self.workers[self.workers.index(worker)] = fresh
        self._await(fresh)
