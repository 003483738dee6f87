"""aten's memory-efficient attention for CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid5d.context_parallel.kernels.base import BlockKernel, heads_first
from hybrid5d.context_parallel.kernels.chunked import ChunkedKernel
from hybrid5d.plan.sequence_blocks import Block


class AtenEfficientKernel(BlockKernel):
    """aten's memory-efficient attention for CUDA, for fp32; kv heads are expanded per call, bands go to `chunked`."""

    name = "aten_efficient"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Block, scale: float) -> tuple[Tensor, Tensor]:
        if call.kind == "band":
            return ChunkedKernel().forward(q, k, v, call, scale)
        heads = heads_first(q, *(_expand(x, q.shape[2]) for x in (k, v)))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            *heads, None, True, 0.0, call.kind == "causal", scale=scale
        )
        return out.transpose(1, 2), lse[:, :, : q.shape[1]]  # the op pads lse to a multiple of 32

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Block, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if call.kind == "band":
            return ChunkedKernel().backward(dout, q, k, v, out, lse, call, scale)
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=float("inf"))
        unused = torch.zeros((), dtype=torch.int64, device=q.device)
        wide = (_expand(x, q.shape[2]) for x in (k, v))
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            *heads_first(dout, q, *wide), None, out.transpose(1, 2), padded, unused, unused, 0.0,
            [True, True, True, False], call.kind == "causal", scale=scale,
        )  # fmt: skip
        groups = (k.shape[2], -1)
        dk, dv = (x.transpose(1, 2).unflatten(2, groups).sum(3) for x in (dk, dv))
        return dq.transpose(1, 2), dk, dv


def _expand(x: Tensor, heads: int) -> Tensor:
    """[b, n, nkv, d] -> [b, n, heads, d]."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)
