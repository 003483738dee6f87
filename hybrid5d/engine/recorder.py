"""When each instruction and each collective of a step ran on this rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from hybrid5d.parallel.watch import Call, watched


class HostClock:
    """The host's monotonic clock: one for all processes of a host."""

    kind = "host"
    now = staticmethod(time.monotonic_ns)

    def start(self) -> None:
        """Before the stamps of a step."""

    def read(self, stamp: Any) -> int:
        """Nanoseconds of a stamp on the host's clock."""
        return int(stamp)


class DeviceClock(HostClock):
    """Events on the current CUDA stream, brought to the host's clock: when the device came there, not the host."""

    kind = "device"

    @staticmethod
    def now() -> Any:  # type: ignore[override]
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        torch.cuda.synchronize()
        self._first, self._at = self.now(), time.monotonic_ns()
        torch.cuda.synchronize()

    def read(self, stamp: Any) -> int:
        stamp.synchronize()
        return self._at + round(self._first.elapsed_time(stamp) * 1e6)


def clock_name() -> str:
    """Processes with the same name read the same monotonic clock: one boot of one machine, one time namespace."""
    found = ["", ""]
    with suppress(OSError):
        found = [open("/proc/sys/kernel/random/boot_id").read().strip(), os.readlink("/proc/self/ns/time")]  # noqa: SIM115
    return " ".join(found) if found[0] else f"process {os.getpid()}"


@dataclass
class StepRecord:
    """One step of this rank; times are nanoseconds of its host's monotonic clock.

    Attributes:
        work: [op, micro-batch, chunk, start, end] of each instruction, in the order in which they ran.
        calls: [op, group, bytes, peer, post start, post end, wait start, wait end] of each operation of a group of
            several ranks; `group` is an index of `Recorder.groups`, `peer` a global rank, -1 where there is none, and
            so are waits.
    """

    step: int
    start: int = 0
    end: int = 0
    work: list[list[Any]] = field(default_factory=list)
    calls: list[list[Any]] = field(default_factory=list)


class Recorder:
    """Times steps. Every stamp is a call of `clock.now`.

    Attributes:
        steps: those that ended.
        groups: (torch's name, global ranks) of the groups in use.
    """

    def __init__(self, device: torch.device):
        self.clock = DeviceClock() if device.type == "cuda" else HostClock()
        self.steps: list[StepRecord] = []
        self.groups: list[tuple[str, tuple[int, ...]]] = []
        self._index: dict[Any, int] = {}
        self._work: list[tuple[str, int, int, Any, Any]] = []

    def timed(self, op: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run`, each call noted as an instruction; it takes DeepSpeed's `buffer_id`, our (chunk, micro-batch), or not.

        Without one, calls of an op are numbered in a step.
        """
        now, work = self.clock.now, self._work

        def call(*args: Any, **kwargs: Any) -> Any:
            begun = now()
            try:
                return run(*args, **kwargs)
            finally:
                chunk, micro = kwargs.get("buffer_id", (0, -1))
                work.append((op, micro, chunk, begun, now()))

        return call

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """What happens inside is a step; one that fails leaves no record."""
        calls: list[Call] = []
        self._work.clear()
        self.clock.start()
        with watched(calls, self.clock.now):
            begun = self.clock.now()
            yield
            ended = self.clock.now()
        read = self.clock.read
        record = StepRecord(number, read(begun), read(ended))
        for op, micro, chunk, start, end in self._work:
            micro = sum(w[0] == op for w in record.work) if micro < 0 else micro
            record.work.append([op, micro, chunk, read(start), read(end)])
        record.calls = [self._call(call) for call in calls if call.group.size() > 1]
        self.steps.append(record)

    def _call(self, call: Call) -> list[Any]:
        if call.group not in self._index:
            self._index[call.group] = len(self.groups)
            self.groups.append((c10d._world.pg_names[call.group], tuple(dist.get_process_group_ranks(call.group))))
        at = self._index[call.group]
        peer = -1 if call.peer is None else self.groups[at][1][call.peer]
        waits = [-1, -1] if call.wait is None else [self.clock.read(stamp) for stamp in call.wait]
        return [call.op, at, call.bytes, peer, *(self.clock.read(stamp) for stamp in call.post), *waits]
