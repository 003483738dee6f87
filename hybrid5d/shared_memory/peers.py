"""Who the ranks are: the host of this process, and whether another process still runs."""

from __future__ import annotations

import json
import os
import platform
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass

_NODE_RANKS = ("GROUP_RANK", "CROSS_RANK", "NODE_RANK")  # torchrun, deepspeed, others: which node this process is on
_STOPPED_FOR = 1.0  # seconds that a process must be seen stopped before it counts


def _start_time(pid: int) -> tuple[str, int]:
    """State letter and start time (clock ticks since boot) of a process, from /proc/PID/stat (proc(5))."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as f:
        fields = f.read().rpartition(")")[2].split()
    return fields[0], int(fields[19])


def host_identity() -> str:
    """Equal for two processes only if they share one memory and, as far as the launcher says, one node.

    Boot, /dev/shm, the process ids' namespace (peers open files through it) and the network's: ranks in two network
    namespaces are two hosts to a launcher, also where they share /dev/shm.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
        boot = f.read().strip()
    spaces = [os.stat(f"/proc/self/ns/{name}").st_ino for name in ("pid", "net")]
    node = next((os.environ[name] for name in _NODE_RANKS if name in os.environ), "")
    return json.dumps([platform.node(), boot, os.stat("/dev/shm").st_dev, spaces, node])


@dataclass(frozen=True)
class Process:
    """A process, told from a later one with its number by the time it started."""

    pid: int
    start: int

    @classmethod
    def this(cls) -> Process:
        return cls(os.getpid(), _start_time(os.getpid())[1])


class Watch:
    """Whether the processes of a group still run. One pidfd a process; without pidfds the start time is compared."""

    def __init__(self, processes: Sequence[Process]):
        self._processes = processes
        self._stopped: dict[int, float] = {}
        self._fds: dict[int, int] = {}

    def failure(self, index: int) -> str | None:
        """What is wrong with process `index` ("is gone", "is stopped"), or None."""
        process = self._processes[index]
        try:
            state, start = _start_time(process.pid)
        except (OSError, IndexError, ValueError):
            return "is gone"
        if start != process.start or state in "ZX" or self._exited(index):
            return "is gone"
        if state not in "Tt":
            self._stopped.pop(index, None)
            return None
        since = self._stopped.setdefault(index, time.monotonic())
        return "is stopped" if time.monotonic() - since > _STOPPED_FOR else None

    def _exited(self, index: int) -> bool:
        """A thread that holds the process's number can outlive its main thread: the pidfd knows."""
        if index not in self._fds:
            try:
                self._fds[index] = os.pidfd_open(self._processes[index].pid)
            except ProcessLookupError:
                return True
            except OSError:  # no pidfds here: the start time decides alone
                self._fds[index] = -1
        fd = self._fds[index]
        return fd >= 0 and bool(select.select([fd], [], [], 0)[0]) if fd < 1024 else False

    def close(self) -> None:
        for fd in self._fds.values():
            if fd >= 0:
                os.close(fd)
        self._fds.clear()
