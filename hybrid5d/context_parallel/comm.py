"""Every message of context parallelism goes through this file, and is counted here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from hybrid5d.parallel.context import Axis


@dataclass
class Traffic:
    """What this rank sent: bytes and number of operations, by kind (`p2p`, `all_to_all`). Only counts."""

    bytes: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, size: int) -> None:
        self.bytes[kind] = self.bytes.get(kind, 0) + size
        self.calls[kind] = self.calls.get(kind, 0) + 1


@dataclass
class Pending:
    """Messages in flight. Holds the sent tensors: gloo reads them after the call, they must live until `wait`."""

    works: list[dist.Work]
    held: Sequence[Tensor]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works, self.held = [], ()


def exchange(
    axis: Axis,
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[tuple[int, Tensor]],
    traffic: Traffic | None,
    kind: str = "p2p",
) -> Pending:
    """Start sending and receiving contiguous tensors to/from axis indices; all at once, so no order can deadlock."""
    ops = [dist.P2POp(dist.isend, t, axis.ranks[peer], axis.group) for peer, t in sends]
    ops += [dist.P2POp(dist.irecv, t, axis.ranks[peer], axis.group) for peer, t in receives]
    if traffic is not None:
        traffic.add(kind, sum(t.numel() * t.element_size() for _, t in sends))
    works = dist.batch_isend_irecv(ops) if ops else []
    return Pending(works, [t for _, t in sends])


def all_to_all(axis: Axis, sources: Sequence[Tensor], targets: Sequence[Tensor], traffic: Traffic | None) -> None:
    """For every pair: targets[i][r] = sources[i][own index] of rank r. Both are views [n, ...] with any strides.

    Pairwise messages, as NCCL does inside: the own part is copied once and touches no buffer, contiguous parts are sent
    from and received into their place, and large fresh buffers (page faults on CPU) are few.
    """
    peers = [(axis.rank + i) % axis.size for i in range(1, axis.size)]
    sends = [(p, x[p].contiguous()) for p in peers for x in sources]
    places = [(p, y[p]) for p in peers for y in targets]
    receives = [(p, y if y.is_contiguous() else y.new_empty(y.shape)) for p, y in places]
    pending = exchange(axis, sends, receives, traffic, "all_to_all")
    for x, y in zip(sources, targets):
        y[axis.rank].copy_(x[axis.rank])
    pending.wait()
    for (_, place), (_, received) in zip(places, receives):
        if received is not place:
            place.copy_(received)
