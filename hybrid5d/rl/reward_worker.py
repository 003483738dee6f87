"""A process that scores responses; `rewards` starts it by this file's path, so that it imports neither torch nor us.

It answers over one pipe: what it runs may print, hang, or take the process down.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import math
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

Score = Callable[[Sequence[str], Sequence[str], Sequence[Any]], Sequence[Any]]


def last_box(text: str) -> str | None:
    r"""The last `\boxed{...}` of a text whose braces balance, with what is in it; None where there is none."""
    at = len(text)
    while (at := text.rfind("\\boxed", 0, at)) >= 0:
        start = at + len("\\boxed")
        depth = i = 0
        rest = text[start:].lstrip()
        while rest.startswith("{") and i < len(rest):
            depth += {"{": 1, "}": -1}.get(rest[i], 0)
            i += 2 if rest[i] == "\\" else 1  # \{ is no brace
            if depth == 0:
                return "\\boxed" + rest[:i]
    return None


def is_right(response: str, answers: Sequence[str]) -> bool:
    """Whether the response's last balanced box equals one of the answers, by math-verify.

    It is given that box alone: of a whole text it reads several boxes and then refuses every key. Answers are boxed
    too, as `A` and `(1,2)` parse to nothing bare.
    """
    from math_verify import parse, verify

    box = last_box(response)
    if box is None:
        return False
    # its own time limits are alarms that swallowed become wrong answers; whoever started this process has a limit
    found = parse(box, parsing_timeout=None)
    boxed = (last_box(answer) or f"\\boxed{{{answer}}}" for answer in answers)
    return any(verify(parse(b, parsing_timeout=None), found, timeout_seconds=None) for b in boxed)


def _math() -> Score:
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    import math_verify  # noqa: F401  (fails here where it is missing)

    return lambda _, responses, answers: [float(is_right(r, a)) for r, a in zip(responses, answers)]


def _own(path: str, name: str) -> tuple[Score, bool]:
    """One's own function, and whether it takes lists: then its first parameter is called `prompts`."""
    spec = importlib.util.spec_from_file_location("reward_function", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function = getattr(module, name)
    if next(iter(inspect.signature(function).parameters), "") == "prompts":
        return function, True
    return lambda *columns: [function(*row) for row in zip(*columns)], False


def _number(value: Any) -> float:
    if value is None or isinstance(value, str | bytes):
        raise TypeError(f"returned {value!r}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"returned {number}")
    return number


def _score(function: Score, columns: tuple[Sequence[Any], ...]) -> tuple[str, Any]:
    try:
        values = list(function(*columns))
        if len(values) != len(columns[0]):
            raise ValueError(f"returned {len(values)} numbers for {len(columns[0])} rows")
        return "scores", [_number(v) for v in values]
    except BaseException as exc:
        return "error", f"{type(exc).__name__}: {exc}"


def _receive(connection: Connection, jobs: queue.SimpleQueue[Any]) -> None:
    """In a thread of its own: the end of the pipe ends this process, whatever it is doing."""
    try:
        while True:
            jobs.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)


def main() -> None:
    """argv: the pipe's file descriptor, then nothing (math) or a file and the name of a function in it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # sent to a whole job; the trainer ends its workers
        signal.signal(number, signal.SIG_IGN)
    connection, own = Connection(int(sys.argv[1])), sys.argv[2:]
    # this file's folder is not for import; the function's is
    sys.path[:] = [p for p in sys.path if p != os.path.dirname(os.path.abspath(__file__))]
    sys.path[:0] = [os.path.dirname(os.path.abspath(own[0]))] if own else []
    jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, jobs), daemon=True).start()
    try:
        function, lists = _own(*own) if own else (_math(), False)
    except BaseException as exc:
        connection.send(("error", f"{type(exc).__name__}: {exc}"))
        return
    connection.send(("ready", lists))
    while True:
        connection.send(_score(function, jobs.get()))


if __name__ == "__main__":
    main()
