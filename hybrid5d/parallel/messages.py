"""Messages between members of an axis: the one way that tensors are sent point to point."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
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


def send(axis: Axis, peer: int, x: Tensor) -> Pending[None]:
    """Start sending a tensor to an axis index; it is kept until the message is gone."""
    x = x.contiguous()
    return Pending([dist.isend(x, axis.ranks[peer], axis.group)], lambda: None, [x])


class Inbox:
    """Tensors that one peer sends in a known order, received into fresh memory and asked for in any order.

    The receive after the next one is always posted, so that a message arrives while something is computed.

    Args:
        axis: carries messages of this direction alone; on NCCL a send would block a receive behind it.
        coming: key and shape of each message, in the order of the peer's sends.
    """

    def __init__(
        self, axis: Axis, peer: int, coming: Sequence[tuple[Hashable, Sequence[int]]], dtype: torch.dtype,
        device: torch.device,
    ):  # fmt: skip
        self._axis, self._source, self._dtype, self._device = axis, axis.ranks[peer], dtype, device
        self._coming = deque(coming)
        self._posted: deque[tuple[Hashable, Tensor, Any]] = deque()
        self._arrived: dict[Hashable, Tensor] = {}
        self._post()

    def _post(self) -> None:
        if self._coming:
            key, shape = self._coming.popleft()
            x = torch.empty(tuple(shape), dtype=self._dtype, device=self._device)
            self._posted.append((key, x, dist.irecv(x, self._source, self._axis.group)))

    def take(self, key: Hashable) -> Tensor:
        """The message of a key, once; waits for it."""
        while key not in self._arrived:
            got, x, work = self._posted.popleft()
            self._post()
            work.wait()
            self._arrived[got] = x
        return self._arrived.pop(key)
