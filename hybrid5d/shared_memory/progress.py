"""Work under way, and the waits that move it.

A collective is a generator that stops where a peer has to come first. Nothing runs in the background: whatever is
called or waited for moves all that this process has begun (MPI's weak progress), and small operations leave their data
in shared memory when they are begun, so that no peer depends on a later call.

A wait spins, then gives its core away, then sleeps, longer the longer nothing moves. How long it spins depends on
whether the ranks of this host have a core each.
"""

from __future__ import annotations

import datetime
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Need = tuple[Sequence[int], int]  # peers waited for (group ranks) and the phase that they must reach; -1: a message
Steps = Iterator[Need]

_CHECK = 0.25  # seconds between looks at whether the peers live
_NAPS = ((0.005, 50e-6), (0.05, 200e-6), (0.5, 1e-3), (float("inf"), 2e-3))  # (waited less than, sleep) in seconds
lock = threading.RLock()
_active: list[Mover] = []


class Mover(Protocol):
    """Something that has work under way."""

    def pump(self) -> None:
        """Go as far as it can without waiting."""

    def blockers(self, need: Need) -> Sequence[int]:
        """The peers in `need` that have not come yet."""

    def lost(self, peers: Sequence[int]) -> str | None:
        """Says which of the peers is gone, stopped or has left."""

    def fail(self, error: Exception) -> None:
        """End everything under way with this error."""


class Work(dist._Work):
    """What torch gets for an operation: `wait`, `is_completed`, `get_future`, `result`."""

    def __init__(self, mover: Mover | None, what: str, tensors: Any, seconds: float) -> None:
        super().__init__()
        self.mover, self.what, self.tensors, self.seconds = mover, what, tensors, seconds
        self.done = mover is None
        self.error: Exception | None = None
        self.need: Need = ((), 0)
        self.source = -1
        self.stalled: Callable[[], None] | None = None  # called while a wait for it gets nowhere

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        if not self.done:
            seconds = timeout.total_seconds() if timeout else 0.0
            drive(self, seconds if seconds > 0 else self.seconds)
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        if not self.done and self.mover is not None:
            with lock:
                self.mover.pump()
        return self.done

    def is_success(self) -> bool:
        return self.done and self.error is None

    def exception(self) -> Any:
        return self.error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return list(self.tensors)

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A completed future: C++ that waits for one (DDP's reducer) would not move anything meanwhile."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self.tensors)
        return future


class Queue:
    """Operations of one group, carried out in the order of their calls."""

    def __init__(self, mover: Mover):
        self._mover = mover
        self._works: deque[tuple[Work, Steps]] = deque()

    def at_once(self, steps: Steps) -> bool:
        """Go as far as a few polls allow; whether that was all of the operation. Else `add` goes on with it."""
        with lock:
            if self._works:
                return False
            try:
                for _ in range(pace.spins):
                    if next(steps, None) is None:
                        return True
            except Exception as exc:
                self._mover.fail(exc)
                raise
        return False

    def add(self, work: Work, steps: Steps) -> Work:
        with lock:
            self._works.append((work, steps))
            if len(self._works) == 1:
                activate(self._mover)
                self._mover.pump()
        return work

    def pump(self) -> None:
        works = self._works
        while works:
            work, steps = works[0]
            try:
                need = next(steps)
                if need is not work.need:
                    work.need, pace.moves = need, pace.moves + 1
                return
            except StopIteration:
                works.popleft()
                work.done = True
            except Exception as exc:
                self._mover.fail(exc)
                return

    def fail(self, error: Exception) -> None:
        while self._works:
            work, _ = self._works.popleft()
            work.error, work.done = error, True

    def __bool__(self) -> bool:
        return bool(self._works)


def activate(mover: Mover) -> None:
    """Let every wait move it, until `deactivate`."""
    if mover not in _active:
        _active.append(mover)


def deactivate(mover: Mover) -> None:
    if mover in _active:
        _active.remove(mover)


def pump_all() -> None:
    with lock:
        for mover in tuple(_active):
            mover.pump()


class _Pace:
    """How often a wait polls before it yields and before it sleeps."""

    def __init__(self) -> None:
        self.moves = 0  # grows with what this process has done: a wait in which things move starts its pace again
        self.ranks = 1
        self.settle(1)

    def settle(self, ranks: int) -> None:
        """`ranks` of this host share its cores."""
        self.ranks = max(self.ranks, ranks)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        alone = self.ranks <= cores
        self.spins = 5 if alone else 3  # two ranks may be on one core even so: yields let the other run
        self.yielding = 1e-3 if alone else 3e-3  # seconds
        self.patience = 1e-3 if alone else 20e-3  # seconds that a send waits for a receiver that is there


pace = _Pace()


def drive(work: Work, seconds: float) -> None:
    """Move everything under way until `work` is done.

    Raises:
        dist.DistBackendError: a peer that it needs is gone, or `seconds` are over. The group cannot be used after it.
    """
    mover = work.mover
    assert mover is not None
    for _ in range(pace.spins):
        with lock:
            mover.pump()
        if work.done:
            return
    looked = moved = begin = time.monotonic()
    moves = pace.moves
    while True:
        pump_all()
        if work.done:
            return
        waited = (now := time.monotonic()) - begin
        if moves != pace.moves:
            moves, moved = pace.moves, now
        idle = now - moved
        if work.stalled is not None:
            with lock:
                work.stalled()
        if now - looked > _CHECK:
            looked = now
            _look(work, mover)
        if waited > seconds:
            with lock:
                if not work.done:
                    late = ", ".join(map(str, mover.blockers(work.need)))
                    text = f"{work.what}: timed out after {seconds:g} s, waiting for group ranks {late}"
                    mover.fail(dist.DistBackendError(text))
        elif idle < pace.yielding:
            os.sched_yield()
        else:
            time.sleep(next(nap for limit, nap in _NAPS if idle < limit))


def _look(work: Work, mover: Mover) -> None:
    """Fail the work where one of the peers that it waits for will never come."""
    with lock:
        reason = mover.lost(mover.blockers(work.need))
        if reason is None:
            return
        mover.pump()  # what the peer did before it went is there
        if not work.done and (reason := mover.lost(mover.blockers(work.need))):
            mover.fail(dist.DistBackendError(f"{work.what}: {reason}"))
