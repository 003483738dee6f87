"""aten's flash attention for CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid5d.context_parallel.kernels.base import BlockKernel, band_mask, heads_first
from hybrid5d.plan.sequence_blocks import Block


class AtenCpuKernel(BlockKernel):
    """aten's flash attention for CPU: fp32, fp64, bf16, fp16; GQA native; fp32 lse (fp64 for fp64).

    Small 16-bit blocks are computed, and returned, in fp32: faster below about 512 x 512, and partial results that are
    merged later keep their digits.
    """

    name = "aten_cpu"
    small = 512 * 512

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Block, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = self._widened(q, k, v)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *heads_first(q, k, v), 0.0, call.kind == "causal", attn_mask=_mask(call, q), scale=scale
        )
        return out.transpose(1, 2), lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Block, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, dout, out = self._widened(q, k, v, dout, out)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads_first(dout, q, k, v, out), lse, 0.0, call.kind == "causal", attn_mask=_mask(call, q), scale=scale
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    def _widened(self, q: Tensor, k: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        tensors = (q, k, *others)
        if q.dtype in (torch.bfloat16, torch.float16) and q.shape[1] * k.shape[1] <= self.small:
            return tuple(x.float() for x in tensors)
        return tensors


def _mask(block: Block, q: Tensor) -> Tensor | None:
    if block.kind != "band":
        return None
    return band_mask(block.q1 - block.q0, block.k1 - block.k0, block.shift, block.window, q.dtype, q.device)
