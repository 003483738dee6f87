"""Kernels of variable length: all blocks of a step that share a mask are one call, whatever the number of documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid5d.context_parallel.kernels.base import Call
from hybrid5d.plan.sequence_blocks import Block


class Offsets(NamedTuple):
    """Where sequences begin and end in flattened queries and keys [b * T, heads, d]: int32 [sequences + 1] each."""

    q: Tensor
    k: Tensor


@dataclass(frozen=True)
class VarlenCall:
    """Several blocks in one call; `rows` and `keys` are their ranges one after the other.

    Attributes:
        row_counts, key_counts: lengths of the blocks.
        offsets: of the sequences, for all rows of the batch one after the other; None: a dense call, of one block.
        causal, left, right: the mask they share, counted from each block's lower right corner: with m rows and n keys
            row i sees keys i+n-m-left .. i+n-m+right; -1 = no bound.
    """

    rows: slice | Tensor
    keys: slice | Tensor
    first: bool
    row_counts: tuple[int, ...]
    key_counts: tuple[int, ...]
    causal: bool
    left: int
    right: int
    offsets: Offsets | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """What must lie on the device before the call is made."""
        return [x for x in (self.rows, self.keys, *(self.offsets or ())) if isinstance(x, Tensor)]

    def placed(self, there: Iterator[Tensor]) -> VarlenCall:
        """The same call with `tensors` taken from `there`, in order."""
        rows, keys = (next(there) if isinstance(x, Tensor) else x for x in (self.rows, self.keys))
        offsets = None if self.offsets is None else Offsets(next(there), next(there))
        return replace(self, rows=rows, keys=keys, offsets=offsets)


class VarlenKernel:
    """A kernel that computes many blocks a call and knows windows. Subclasses call the library."""

    name = ""
    native_window = True
    dense = False  # a call of one block needs no offsets

    def calls(self, blocks: tuple[Block, ...], batch: int) -> Sequence[Call]:
        groups: dict[tuple[object, ...], list[list[Block]]] = {}
        for block in blocks:
            same = groups.setdefault((block.kind, block.first, *flash_window(block)), [])
            if same and same[-1][-1].q1 <= block.q0:  # rows of a call are distinct
                same[-1].append(block)
            else:
                same.append([block])
        ready = sorted((g for same in groups.values() for g in same), key=lambda g: not g[0].first)
        return [_call(group, 0 if self.dense and len(group) == 1 else batch) for group in ready]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float) -> tuple[Tensor, Tensor]:
        b, m = q.shape[:2]
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        assert call.offsets is not None
        out, lse = self.varlen_forward(flat, call.offsets, call, scale)
        return out.unflatten(0, (b, m)), lse.unflatten(1, (b, m)).transpose(0, 1)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        flat = [x.flatten(0, 1) for x in (dout, q, k, v, out)]
        flat_lse = lse.transpose(0, 1).flatten(1, 2).contiguous()
        assert call.offsets is not None
        dq, dk, dv = self.varlen_backward(flat, flat_lse, call.offsets, call, scale)
        return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)

    def varlen_forward(
        self, flat: Sequence[Tensor], offsets: Offsets, call: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor]:
        """q [T, nq, d], k, v [T, nkv, d] -> out [T, nq, d], lse [nq, T] fp32."""
        raise NotImplementedError

    def varlen_backward(
        self, flat: Sequence[Tensor], lse: Tensor, offsets: Offsets, call: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dout, q, k, v, out and lse as above -> dq, dk, dv."""
        raise NotImplementedError


def flash_window(block: Block) -> tuple[int, int]:
    """(left, right) of a block, as `VarlenCall` counts them."""
    if block.kind != "band":
        return -1, -1
    right = block.shift - (block.k1 - block.k0) + (block.q1 - block.q0)
    return block.window - 1 - right, right


def _call(blocks: list[Block], batch: int) -> VarlenCall:
    """`batch`: rows that the offsets are for; 0: a dense call."""
    row_counts, key_counts = tuple(b.q1 - b.q0 for b in blocks), tuple(b.k1 - b.k0 for b in blocks)
    left, right = flash_window(blocks[0])
    return VarlenCall(
        rows=_range([b.rows for b in blocks]),
        keys=_range([b.keys for b in blocks]),
        first=blocks[0].first,
        row_counts=row_counts,
        key_counts=key_counts,
        causal=blocks[0].kind == "causal",
        left=left,
        right=right,
        offsets=Offsets(_offsets(row_counts * batch), _offsets(key_counts * batch)) if batch else None,
    )


def _offsets(counts: tuple[int, ...]) -> Tensor:
    return torch.tensor(list(accumulate((0, *counts))), dtype=torch.int32)


def _range(ranges: list[slice]) -> slice | Tensor:
    """One slice where the ranges follow each other, else an index."""
    if all(a.stop == b.start for a, b in pairwise(ranges)):
        return slice(ranges[0].start, ranges[-1].stop)
    return torch.cat([torch.arange(r.start, r.stop) for r in ranges])
