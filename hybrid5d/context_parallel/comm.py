"""Every message of context parallelism goes through this file, and is counted here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
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
    axis: Axis, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], traffic: Traffic | None
) -> Pending:
    """Start sending and receiving contiguous tensors to/from axis indices; all at once, so no order can deadlock."""
    ops = [dist.P2POp(dist.isend, t, axis.ranks[peer], axis.group) for peer, t in sends]
    ops += [dist.P2POp(dist.irecv, t, axis.ranks[peer], axis.group) for peer, t in receives]
    if traffic is not None:
        for _, t in sends:
            traffic.add("p2p", t.numel() * t.element_size())
    works = dist.batch_isend_irecv(ops) if ops else []
    return Pending(works, [t for _, t in sends])


def all_to_all(axis: Axis, send: Tensor, traffic: Traffic | None) -> Tensor:
    """send: [n, ...] contiguous, part i for axis index i -> [n, ...], part i from axis index i."""
    receive = torch.empty_like(send)
    if traffic is not None:
        part = send.numel() * send.element_size() // axis.size
        traffic.add("all_to_all", part * (axis.size - 1))  # the own part does not travel
    dist.all_to_all_single(receive, send, group=axis.group)
    return receive
