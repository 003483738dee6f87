"""Sides of a comparison: each a few rank processes that live all the time and take one step when they are told to."""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any


class SideFailed(Exception):
    """A rank ended, or did not answer; the message is the last line that it wrote."""


# --- one rank -------------------------------------------------------------------------------------------------------


def answer(build: Callable[[], Callable[[], Any]]) -> None:
    """Answer each line of standard input with one step of what `build` gives.

    `{"wall": s, "cpu": s, "faults": n, "peak": MB, "value": what the step returned}`; CPU-seconds of all threads, page
    faults, and the step's highest resident memory less what was resident before `build`: import before.
    """
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print; the pipe is for answers
    imported = _status("VmRSS")
    step = build()
    for _ in sys.stdin:
        Path("/proc/self/clear_refs").write_text("5")  # the highest resident size starts anew
        before, wall = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        value = step()
        wall, after = time.perf_counter() - wall, resource.getrusage(resource.RUSAGE_SELF)
        took = {
            "wall": wall,
            "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "faults": after.ru_minflt - before.ru_minflt,
            "peak": _status("VmHWM") - imported,
            "value": value,
        }
        print(json.dumps(took), file=answers, flush=True)


def _status(key: str) -> float:
    """A size of this process, MB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1000


# --- all of them ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """The ranks of one contender, waiting for their turn."""

    ranks: list[subprocess.Popen[str]]
    log: IO[str]

    @classmethod
    def start(cls, words: list[str], world: int, environment: Mapping[str, str] | None = None) -> Side:
        """Start `world` ranks of a Python command that share two threads."""
        common = {
            **os.environ, "OMP_NUM_THREADS": str(2 // world), "OMP_WAIT_POLICY": "PASSIVE", "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()),
            "DS_LOG_LEVEL": "error", **(environment or {}),
        }  # fmt: skip
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by `stop`
        ranks = []
        for rank in range(world):
            place = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)} if world > 1 else {}
            pipe = subprocess.PIPE
            ranks.append(subprocess.Popen(
                [sys.executable, *words], env={**common, **place}, stdin=pipe, stdout=pipe, stderr=log, text=True,
            ))  # fmt: skip
        return cls(ranks, log)

    def step(self, patience: float = 300.0) -> dict[str, Any]:
        """One step: CPU-seconds and faults of all ranks, the slowest's time, the largest's memory; rank 0's value.

        Raises:
            SideFailed: a rank ended or did not answer within `patience` seconds.
        """
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write("step\n")
            rank.stdin.flush()
        deadline = time.monotonic() + patience
        answers = [self._answer(rank, deadline) for rank in self.ranks]
        return {
            "wall": max(a["wall"] for a in answers),
            "cpu": sum(a["cpu"] for a in answers),
            "faults": sum(a["faults"] for a in answers),
            "peak": max(a["peak"] for a in answers),
            "value": answers[0]["value"],
        }

    def _answer(self, rank: subprocess.Popen[str], deadline: float) -> dict[str, Any]:
        assert rank.stdout is not None
        while not select.select([rank.stdout], [], [], 0.2)[0]:
            if any(other.poll() is not None for other in self.ranks) or time.monotonic() > deadline:
                raise SideFailed(self._last_line())
        line = rank.stdout.readline()
        if not line:
            raise SideFailed(self._last_line())
        return json.loads(line)

    def _last_line(self) -> str:
        self.log.seek(0)
        lines = [line.strip() for line in self.log if line.strip()]
        errors = [line for line in lines if "Error" in line and not line.startswith("[rank")]
        return (errors or lines or ["no answer"])[-1][:300]

    def stop(self) -> None:
        """End the ranks."""
        for rank in self.ranks:
            rank.kill()
            rank.wait()
        self.log.close()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
