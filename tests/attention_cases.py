"""Inputs, a full fp64 reference and the run of one case on a rank: shared by the attention tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid5d.context_parallel import ContextParallelAttention, SequencePlan, hybrid_axes
from hybrid5d.parallel.context import Axis
from hybrid5d.plan.layout import ParallelLayout

HEAD_DIM = 16


@dataclass(frozen=True)
class Case:
    """One attention to check. `documents`: per row."""

    method: str = "p2p"
    heads: int = 8
    kv_heads: int = 8
    documents: tuple[tuple[int, ...], ...] = ((37,),)
    packed: bool = False
    window: int | None = None
    balance: str = "zigzag"
    dtype: torch.dtype = torch.float32
    gain: float = 1.0  # scores are multiplied by it
    kernel: str = "auto"
    ulysses: int = 2  # of a2a+p2p

    def rows(self) -> list[tuple[int, ...]]:
        """Per batch row the lengths of what attends separately."""
        if self.packed:
            return [tuple(n for row in self.documents for n in row)]
        return [(sum(row),) for row in self.documents]

    def inputs(self) -> list[list[Tensor]]:
        """Per batch row q, k, v, dout [n, heads, d], the same on every rank."""
        generator = torch.Generator().manual_seed(len(self.documents) + self.kv_heads)
        result = []
        for lengths in self.rows():
            shapes = [(sum(lengths), h, HEAD_DIM) for h in (self.heads, self.kv_heads, self.kv_heads, self.heads)]
            q, *rest = (torch.randn(s, generator=generator) for s in shapes)
            result.append([x.to(self.dtype) for x in (q * self.gain, *rest)])
        return result


def reference(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lengths: tuple[int, ...], window: int | None
) -> list[Tensor]:
    """out, dq, dk, dv of full masked softmax attention in fp64; tensors [n, heads, d]."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(groups, 1)) * HEAD_DIM**-0.5
    age = torch.arange(len(q))[:, None] - torch.arange(len(q))
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = (age >= 0) & (age < (window or len(q) + 1)) & (document[:, None] == document)
    out = torch.einsum(
        "hqk,khd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v.repeat_interleave(groups, 1)
    )
    out.backward(dout.double())
    return [out.detach(), q.grad, k.grad, v.grad]


class Runner:
    """Runs cases on this rank of a context-parallel world."""

    def __init__(self, rank: int, world: int):
        self.rank, self.world = rank, world
        self.axis = Axis.from_group(None) if world > 1 else Axis.single()
        self._hybrid = {
            u: hybrid_axes(ParallelLayout(cp=world), rank, u) for u in range(1, world + 1) if world % u == 0
        }

    def plan(self, case: Case) -> SequencePlan:
        return SequencePlan.build(
            case.documents, self.world, case.method, case.ulysses, case.balance, packed=case.packed
        )

    def attention(self, case: Case) -> ContextParallelAttention:
        axes = self._hybrid[case.ulysses] if case.method == "a2a+p2p" else ()
        return ContextParallelAttention(self.axis, case.method, *axes, kernel=case.kernel)

    def local(self, case: Case) -> tuple[list[Tensor], Tensor]:
        """q, k, v, dout of this rank [b, S/cp, heads, d] with noise in the padding, and the index [b, S/cp]."""
        index = torch.from_numpy(self.plan(case).source_index(self.rank))
        rows = [
            [torch.cat([x, torch.randn(1, *x.shape[1:]).to(x.dtype)])[at] for x in row]
            for row, at in zip(case.inputs(), index)
        ]
        q, k, v, dout = (torch.stack(x) for x in zip(*rows))
        return [q, k, v, dout * (index >= 0)[..., None, None]], index

    def run(self, case: Case) -> list[Tensor]:
        """out, dq, dk, dv on this rank."""
        (q, k, v, dout), _ = self.local(case)
        for x in (q, k, v):
            x.requires_grad_()
        out = self.attention(case)(q, k, v, self.plan(case), case.window)
        out.backward(dout)
        return [out.detach(), q.grad, k.grad, v.grad]

    def errors(self, case: Case) -> list[Error]:
        """Deviation of out, dq, dk, dv from the fp64 reference over this rank's tokens."""
        results = self.run(case)
        _, index = self.local(case)
        errors = [Error() for _ in results]
        for b, (row, lengths) in enumerate(zip(case.inputs(), case.rows())):
            at = index[b]
            for i, (mine, right) in enumerate(zip(results, reference(*row, lengths, case.window))):
                if (at >= 0).any():
                    error = mine[b][at >= 0].double() - right[at[at >= 0]]
                    here = Error(error.abs().max().item(), error.square().sum().item(), right.abs().max().item())
                    errors[i] = errors[i] + here
                if not torch.isfinite(mine).all():  # padding included
                    errors[i] = Error(float("inf"), float("inf"))
        return errors


@dataclass(frozen=True)
class Error:
    """Largest and summed squared deviation, and the largest value of the reference; adds over rows and ranks."""

    largest: float = 0.0
    squares: float = 0.0
    scale: float = 0.0

    def __add__(self, other: Error) -> Error:
        parts = max(self.largest, other.largest), self.squares + other.squares, max(self.scale, other.scale)
        return Error(*parts)
