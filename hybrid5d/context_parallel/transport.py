"""How keys and values reach the ranks that attend to them, and how their gradients come home.

kv = K and V packed as [2, b, S/ring, nkv, d]: one message each way. Index i of a step counts from the own block (0).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid5d.parallel.context import Axis
from hybrid5d.parallel.messages import Pending, Traffic, exchange
from hybrid5d.plan.sequence import SequencePlan

Part = tuple[slice | Tensor, Tensor, Tensor]  # keys (range or index) and the dk, dv [b, n, nkv, d] they got


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for 16-bit types, else the type itself: what partial results are summed in, across hops too."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def sum_parts(parts: Sequence[Part], like: Tensor, total: Tensor | None = None) -> Tensor:
    """Add dk, dv of kernel calls to their keys in `total` (default zeros) [2, b, S/ring, nkv, d]; `like` is k."""
    if total is None:
        total = torch.zeros((2, *like.shape), dtype=accumulate_dtype(like.dtype), device=like.device)
    for keys, dk, dv in parts:
        for grad, part in zip(total, (dk, dv)):
            if isinstance(keys, slice):
                grad[:, keys] += part
            else:
                grad.index_add_(1, keys, part.to(grad.dtype))  # calls with a window share keys
    return total


class Transport:
    """No other ranks: the keys are all here. Base of the two that communicate."""

    def __init__(self, axis: Axis, plan: SequencePlan, window: int | None, traffic: Traffic | None):
        self.axis, self.traffic = axis, traffic
        self.hops = 0  # steps after the own block

    def start(self, k: Tensor, v: Tensor) -> None:
        """Post what can be sent before the first kernel. k, v: [b, S/ring, nkv, d]."""
        self.k, self.v = k, v

    def fetch(self, i: int) -> tuple[Tensor, Tensor]:
        """k, v of step i's source, in order i = 0..hops."""
        return self.k, self.v

    def send_grad(self, i: int, parts: list[Part]) -> None:
        """Take this rank's dk, dv of step i on their way; called for every i in 1..hops."""

    def collect(self, home: list[Part]) -> tuple[Tensor, Tensor]:
        """dk, dv of the own keys: the own parts plus what the other ranks computed."""
        if self.hops == 0 and len(home) == 1 and home[0][1].shape == self.k.shape:
            return home[0][1], home[0][2]
        total = sum_parts(home, self.k)
        for received in self._returned():
            total += received
        return total[0], total[1]

    def _returned(self) -> Sequence[Tensor]:
        return ()


class RingTransport(Transport):
    """`p2p`: blocks move to rank + 1 at every step, gradients follow them and go home from the last holder."""

    def __init__(self, axis: Axis, plan: SequencePlan, window: int | None, traffic: Traffic | None):
        super().__init__(axis, plan, window, traffic)
        self.hops = plan.hops(window)
        self._coming: tuple[Tensor, Pending[None]] | None = None
        self._grad: tuple[Tensor, Pending[None]] | None = None  # of the block that comes next, from the previous holder

    def _shift(self, tensor: Tensor, distance: int) -> tuple[Tensor, Pending[None]]:
        to, back = (self.axis.rank + distance) % self.axis.size, (self.axis.rank - distance) % self.axis.size
        received = torch.empty_like(tensor)
        return received, exchange(self.axis, [(to, tensor)], [(back, received)], self.traffic)

    def start(self, k: Tensor, v: Tensor) -> None:
        super().start(k, v)
        if self.hops:
            self._coming = self._shift(torch.stack((k, v)), 1)

    def fetch(self, i: int) -> tuple[Tensor, Tensor]:
        if i == 0 or self._coming is None:
            return self.k, self.v
        kv, pending = self._coming
        pending.wait()
        self._coming = self._shift(kv, 1) if i < self.hops else None
        return kv[0], kv[1]

    def send_grad(self, i: int, parts: list[Part]) -> None:
        total = None
        if self._grad is not None:
            total, pending = self._grad
            pending.wait()
        total = sum_parts(parts, self.k, total)
        self._grad = self._shift(total, 1 if i < self.hops else -self.hops)

    def _returned(self) -> Sequence[Tensor]:
        if self._grad is None:
            return ()
        received, pending = self._grad
        pending.wait()
        return (received,)


class GatherTransport(Transport):
    """`all_gather`: every rank sends its block straight to the ranks that need it; gradients come straight back.

    Pairwise messages on every backend: a block is used as soon as it is here, blocks the mask empties are not sent.
    At step i all ranks send to rank + i and receive from rank - i (gradients the other way): no order can deadlock.
    """

    def __init__(self, axis: Axis, plan: SequencePlan, window: int | None, traffic: Traffic | None):
        super().__init__(axis, plan, window, traffic)
        self.hops = axis.size - 1
        self._needs, self._needed = _readers(plan, axis.rank, window)
        self._blocks: dict[int, tuple[Tensor, Pending[None]]] = {}
        self._grads: list[tuple[Tensor | None, Pending[None]]] = []

    def _peer(self, distance: int) -> int:
        return (self.axis.rank + distance) % self.axis.size

    def start(self, k: Tensor, v: Tensor) -> None:
        super().start(k, v)
        kv = torch.stack((k, v))
        for i in range(1, self.hops + 1):
            block = torch.empty_like(kv if self._needs[i] else kv[:, :, :0])
            sends = [(self._peer(i), kv)] if self._needed[i] else []
            receives = [(self._peer(-i), block)] if self._needs[i] else []
            self._blocks[i] = block, exchange(self.axis, sends, receives, self.traffic)

    def fetch(self, i: int) -> tuple[Tensor, Tensor]:
        if i == 0:
            return self.k, self.v
        block, pending = self._blocks.pop(i)
        pending.wait()
        return block[0], block[1]

    def send_grad(self, i: int, parts: list[Part]) -> None:
        sends = [(self._peer(-i), sum_parts(parts, self.k))] if self._needs[i] else []
        received = sum_parts((), self.k) if self._needed[i] else None
        receives = [(self._peer(i), received)] if received is not None else []
        self._grads.append((received, exchange(self.axis, sends, receives, self.traffic)))

    def _returned(self) -> Sequence[Tensor]:
        for _, pending in self._grads:
            pending.wait()
        return [received for received, _ in self._grads if received is not None]  # in step order: deterministic


def _readers(plan: SequencePlan, rank: int, window: int | None) -> tuple[list[bool], list[bool]]:
    """By step: does this rank need the block of rank - i, does rank + i need this one's."""
    key = ("readers", rank, window)
    if key not in plan.cache:
        needs = [plan.sees(rank, (rank - i) % plan.ring, window) for i in range(plan.ring)]
        needed = [plan.sees((rank + i) % plan.ring, rank, window) for i in range(plan.ring)]
        plan.cache[key] = (needs, needed)
    return plan.cache[key]
