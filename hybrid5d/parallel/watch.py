"""Collectives and messages of this process, timed between torch.distributed and its process groups.

That is the one place that sees all of them: ours, DeepSpeed's and torch's own. Where nothing is watched nothing is
wrapped. Stamps are the caller's: a host's clock, or events on a device's stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hybrid5d.parallel.agree import gather_objects
from hybrid5d.parallel.context import Axis
from hybrid5d.shared_memory import SharedMemoryGroup

# Method of a process group -> (operation, which argument holds what this rank gives); torch has two names of some.
_METHODS: dict[str, tuple[str, int | None]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "reduce": ("reduce", 0),
    "broadcast": ("broadcast", 0),
    "allgather": ("all_gather", 1),
    "_allgather_base": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "allgather_into_tensor_coalesced": ("all_gather", 1),
    "all_gather_single_coalesced": ("all_gather", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 1),
    "barrier": ("barrier", None),
    "send": ("send", 0),
    "recv": ("recv", 0),
}
POINT_TO_POINT = ("send", "recv")
_CLASSES: tuple[Any, ...] = (dist.ProcessGroup, SharedMemoryGroup)


@dataclass(slots=True)
class Call:
    """One operation of a process group on this rank.

    Attributes:
        bytes: of the tensors that this rank gave; of a receive, those that it gets.
        peer: index in the group that a message goes to or comes from.
        post: before and after the call that began it. wait: the same of the wait for it; None: nobody waited.
    """

    op: str
    group: Any
    bytes: int
    peer: int | None
    post: tuple[Any, Any]
    wait: tuple[Any, Any] | None = None


class _Watched:
    """A work object whose wait is timed."""

    def __init__(self, work: Any, calls: Sequence[Call], now: Callable[[], Any]):
        self._work, self._calls, self._now = work, calls, now

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        begun = self._now()
        try:
            return self._work.wait(*args, **kwargs)
        finally:
            ended = self._now()
            for call in self._calls:
                call.wait = call.wait or (begun, ended)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _size(given: Any) -> int:
    if isinstance(given, Tensor):
        return given.numel() * given.element_size()
    return sum(map(_size, given))


@contextmanager
def watched(calls: list[Call], now: Callable[[], Any]) -> Iterator[None]:
    """Inside, every operation of a process group is appended to `calls`, stamped by `now`."""
    inside = False
    together: dict[Any, list[Call]] = {}  # of groups that send several messages as one

    def timed(plain: Any, op: str, at: int | None) -> Any:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:  # an operation made of another
                return plain(group, *args, **kwargs)
            inside, begun = True, now()
            try:
                work = plain(group, *args, **kwargs)
            finally:
                inside = False
            peer = args[1] if op in POINT_TO_POINT else None
            result = Call(op, group, 0 if at is None else _size(args[at]), peer, (begun, now()))
            calls.append(result)
            if group in together:
                together[group].append(result)
            return work if work is None else _Watched(work, [result], now)

        return call

    def start(plain: Any) -> Any:
        def call(group: Any, *args: Any) -> Any:
            together[group] = []
            return plain(group, *args)

        return call

    def end(plain: Any) -> Any:
        def call(group: Any, *args: Any) -> Any:
            work, mine = plain(group, *args), together.pop(group, [])
            return work if work is None else _Watched(work, mine, now)

        return call

    wrappers: dict[str, Callable[[Any], Any]] = {"_start_coalescing": start, "_end_coalescing": end}
    wrappers |= {name: partial(timed, op=op, at=at) for name, (op, at) in _METHODS.items()}
    plain = [(cls, name, cls.__dict__[name]) for cls in _CLASSES for name in wrappers if name in cls.__dict__]
    try:
        for cls, name, method in plain:
            setattr(cls, name, wrappers[name](method))
        yield
    finally:
        for cls, name, method in plain:
            setattr(cls, name, method)


def clock_offset(axis: Axis, clock: str, now: Callable[[], int], rounds: int = 16) -> tuple[int, int]:
    """How far this rank's clock is ahead of the first rank's, and by how much that may be wrong; nanoseconds.

    Ranks that read one clock (`clock`: its name) are not apart. Else each round of messages says that no rank ended it
    before another one began it, which bounds the offset from both sides; the middle is taken (Cristian 1989).
    Collective over the axis.
    """
    names = gather_objects(clock, axis)
    if len(set(names)) == 1:
        return 0, 0
    mine: list[tuple[int, int]] = []
    for _ in range(rounds):
        begun = now()
        gather_objects(None, axis)
        mine.append((begun, now()))
    first = gather_objects(mine, axis)[0]
    if names[axis.rank] == names[0]:
        return 0, 0
    low = max(begun - ended for (begun, _), (_, ended) in zip(mine, first))
    high = min(ended - begun for (_, ended), (begun, _) in zip(mine, first))
    return (low + high) // 2, (high - low + 1) // 2
