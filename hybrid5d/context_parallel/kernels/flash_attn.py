"""The flash-attn package, variable-length form: all blocks of a step that share a mask are one call.

A ring needs a backward that takes (out, lse) from outside. Neither flash-attn's public functions nor torch's
`varlen_attn` offer one, so this calls the two private ones of flash-attn 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from hybrid5d.context_parallel.kernels.base import Call, flash_window
from hybrid5d.plan.sequence_blocks import Block


@dataclass(frozen=True)
class VarlenCall:
    """Several blocks in one call; `rows` and `keys` are their ranges one after the other."""

    rows: slice | Tensor
    keys: slice | Tensor
    first: bool
    row_counts: tuple[int, ...]
    key_counts: tuple[int, ...]
    options: dict[str, Any]  # causal and window of the package
    offsets: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # cu_seqlens by batch size

    def cu_seqlens(self, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Offsets of the sequences of a flattened [b * T, heads, d], int32."""
        if batch not in self.offsets:
            both = (self.row_counts, self.key_counts)
            cu = [torch.tensor(list(accumulate((0, *counts * batch))), dtype=torch.int32) for counts in both]
            self.offsets[batch] = (cu[0].to(device), cu[1].to(device))
        return self.offsets[batch]


class FlashAttnKernel:
    """flash-attn 2 on CUDA: fp16 and bf16, GQA and windows native."""

    name = "flash_attn"

    def __init__(self) -> None:
        from flash_attn import flash_attn_interface as package

        self._forward, self._backward = package._flash_attn_varlen_forward, package._flash_attn_varlen_backward

    def calls(self, blocks: tuple[Block, ...], device: torch.device) -> Sequence[Call]:
        groups: list[tuple[tuple[object, ...], list[Block]]] = []
        for block in blocks:
            key = (block.kind, block.first, *flash_window(block).items())
            if groups and groups[-1][0] == key and groups[-1][1][-1].q1 <= block.q0:  # rows of a call are distinct
                groups[-1][1].append(block)
            else:
                groups.append((key, [block]))
        return [_call(group, device) for _, group in groups]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float) -> tuple[Tensor, Tensor]:
        b, m = q.shape[:2]
        cu_q, cu_k = call.cu_seqlens(b, q.device)
        out, lse, *_ = self._forward(
            *(x.flatten(0, 1) for x in (q, k, v)), cu_q, cu_k, max(call.row_counts), max(call.key_counts), 0.0, scale,
            **call.options,
        )  # fmt: skip
        return out.unflatten(0, (b, m)), lse.unflatten(1, (b, m)).transpose(0, 1)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        cu_q, cu_k = call.cu_seqlens(q.shape[0], q.device)
        flat = [x.flatten(0, 1) for x in (dout, q, k, v, out)]
        dq, dk, dv = (torch.empty(x.flatten(0, 1).shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        self._backward(
            *flat, lse.transpose(0, 1).flatten(1, 2).contiguous(), dq, dk, dv, cu_q, cu_k,
            max(call.row_counts), max(call.key_counts), 0.0, scale,
            softcap=0.0, alibi_slopes=None, deterministic=True, **call.options,
        )  # fmt: skip
        return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


def _call(blocks: list[Block], device: torch.device) -> VarlenCall:
    window = flash_window(blocks[0]) or {"window_size_left": -1, "window_size_right": -1}
    return VarlenCall(
        rows=_ranges([b.rows for b in blocks], device),
        keys=_ranges([b.keys for b in blocks], device),
        first=blocks[0].first,
        row_counts=tuple(b.q1 - b.q0 for b in blocks),
        key_counts=tuple(b.k1 - b.k0 for b in blocks),
        options={"causal": blocks[0].kind == "causal", **window},
    )


def _ranges(ranges: list[slice], device: torch.device) -> slice | Tensor:
    """One slice where the ranges follow each other, else an index."""
    if all(a.stop == b.start for a, b in pairwise(ranges)):
        return slice(ranges[0].start, ranges[-1].stop)
    return torch.cat([torch.arange(r.start, r.stop) for r in ranges]).to(device)
