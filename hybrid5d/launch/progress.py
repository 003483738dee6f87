"""What each rank of a node does and since when, in small files that outlive a stop of its process; and when to worry.

A rank that stands still (stopped, waiting for a collective that another skipped, a call that holds the interpreter)
cannot say so, and the others wait for it. The first rank that sees no progress says what all of them do, the odd one
first, and the job ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import psutil

from hybrid5d.console import ranks_text

LEARNT_FACTOR, LEARNT_SECONDS = 20.0, 600.0
OTHER_PHASES = 10.0  # a save, an evaluation, an export, rollouts, and the first step
_STACK_LINES = 24
STACK = "stack"


class Progress:
    """This rank's notes.

    Attributes:
        timeout: `runner.hang_timeout`: seconds that a step may take; None: learnt from the longest one.
    """

    def __init__(self, path: Path | None, timeout: float | None = None):
        self.path, self.timeout = path, timeout
        self.where, self.since = "start", time.monotonic()
        self._longest: float | None = None
        self.watched = False  # only what the training loop does: before it, files are read and layers are built

    def note(self, where: str) -> None:
        """From now on this rank does `where`."""
        now = time.monotonic()
        if self.where.startswith("step "):
            self._longest = max(self._longest or 0.0, now - self.since)
        changed, self.where, self.since, self.watched = where != self.where, where, now, True
        if self.path is not None and changed:
            with contextlib.suppress(OSError):
                self.path.write_text(where)

    @property
    def limit(self) -> float:
        """Seconds that the present phase may take."""
        step = self.timeout or max(LEARNT_SECONDS, LEARNT_FACTOR * (self._longest or 0.0))
        known = self._longest is not None and self.where.startswith("step ")
        return step if known else OTHER_PHASES * step

    @property
    def overdue(self) -> float | None:
        """Seconds without progress, where those are too many."""
        seconds = time.monotonic() - self.since
        return seconds if self.watched and seconds > self.limit else None


def leave_stack(path: Path) -> None:
    """Write what the main thread of this process does, for the rank that reports."""
    with contextlib.suppress(OSError):
        path.write_text(main_stack())


def main_stack() -> str:
    """Where the main thread is, innermost call last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines = "".join(traceback.format_stack(frame)).splitlines() if frame is not None else []
    return "\n".join(lines[-_STACK_LINES:])


def describe(folder: Path, ranks: Sequence[int]) -> str:
    """What the ranks of a node do: by their notes, stacks and the state of their processes; the odd ones first."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for rank in ranks:
        where, state, stack = "start", "", ""
        with contextlib.suppress(OSError, ValueError):
            where = (folder / f"{rank}.note").read_text()
        with contextlib.suppress(OSError, ValueError, psutil.Error):
            state = psutil.Process(int((folder / f"{rank}.pid").read_text().split()[0])).status()
        with contextlib.suppress(OSError):
            stack = (folder / f"{rank}.{STACK}").read_text()
        groups.setdefault((where, state, stack), []).append(rank)
    lines = []
    for (where, state, stack), members in sorted(groups.items(), key=lambda item: (bool(item[0][2]), len(item[1]))):
        if state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_DISK_SLEEP):
            what = f"{where}; its process is in state {state!r} and cannot answer"
        else:
            what = where if stack else f"{where}; it does not answer: one call holds the interpreter"
        lines += [f"  {ranks_text(members)}: {what}", *(f"    {line}" for line in stack.splitlines())]
    return "\n".join(lines[:150])


def end_processes(folder: Path, only_stopped: bool = False) -> None:
    """SIGKILL the other ranks of this node: a stopped one can end in no other way."""
    for path in folder.glob("*.pid"):
        with contextlib.suppress(OSError, ValueError, psutil.Error):
            pid, started = map(int, path.read_text().split())
            process = psutil.Process(pid)
            if not same_process(pid, started):
                continue  # the id is another process's by now
            if process.pid != os.getpid() and (not only_stopped or process.status() == psutil.STATUS_STOPPED):
                process.kill()


def started_at(pid: int) -> int:
    """When a process started, in ticks since boot where the system tells it; 0 where there is no such process."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    try:
        return round(psutil.Process(pid).create_time())
    except psutil.Error:
        return 0


def same_process(pid: int, started: int) -> bool:
    """The process of that id is still the one that started then, and runs."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE and started_at(pid) == started
    except psutil.Error:
        return False


def pid_file_alive(path: Path) -> bool:
    """The process that a `RANK.pid` file names is still that one, and runs; True where the file is being written."""
    try:
        pid, started = path.read_text().split()
    except (OSError, ValueError):
        return True  # being written
    return same_process(int(pid), int(started))
