"""Messages between members of an axis: the one way that tensors are sent point to point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch import Tensor

from hybrid5d.parallel.context import Axis

T = TypeVar("T")
U = TypeVar("U")


class Pending(Generic[T]):
    """Communication under way. `wait()` ends it and returns its result; call it once.

    `held` tensors live until then: gloo reads what is sent after the call that sends it.
    """

    def __init__(self, works: Sequence[Any], result: Callable[[], T], held: Sequence[Tensor] = ()):
        self._works, self._result, self._held = works, result, held

    def wait(self) -> T:
        for work in self._works:
            work.wait()
        self._works, self._held = (), ()
        return self._result()

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return all(work.is_completed() for work in self._works)

    def then(self, result: Callable[[], U]) -> Pending[U]:
        """The same communication with another result."""
        return Pending(self._works, result, self._held)


def done(x: T) -> Pending[T]:
    """Nothing to wait for."""
    return Pending((), lambda: x)


@dataclass
class Traffic:
    """What this rank sent: bytes and number of operations, by kind (`p2p`, `all_to_all`). Only counts."""

    bytes: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, size: int) -> None:
        self.bytes[kind] = self.bytes.get(kind, 0) + size
        self.calls[kind] = self.calls.get(kind, 0) + 1


def exchange(
    axis: Axis,
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[tuple[int, Tensor]],
    traffic: Traffic | None = None,
    kind: str = "p2p",
) -> Pending[None]:
    """Start sending and receiving contiguous tensors to/from axis indices; all at once, so no order can deadlock."""
    ops = [dist.P2POp(dist.irecv, t, axis.ranks[peer], axis.group) for peer, t in receives]
    ops += [dist.P2POp(dist.isend, t, axis.ranks[peer], axis.group) for peer, t in sends]
    if traffic is not None:
        traffic.add(kind, sum(t.numel() * t.element_size() for _, t in sends))
    works = dist.batch_isend_irecv(ops) if ops else []
    return Pending(works, lambda: None, [t for _, t in sends])
