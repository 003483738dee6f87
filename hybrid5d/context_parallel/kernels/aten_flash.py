"""aten's flash attention for CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid5d.context_parallel.kernels.base import BlockKernel, flash_window
from hybrid5d.plan.sequence_blocks import Block


class AtenFlashKernel(BlockKernel):
    """aten's flash attention for CUDA: fp16 and bf16, GQA and windows native, d a multiple of 8 up to 256."""

    name = "aten_flash"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Block, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, call.kind == "causal", False,
            scale=scale, **flash_window(call),
        )  # fmt: skip
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Block, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # random state of dropout, which is 0
        return torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse.contiguous(), None, None, q.shape[1], k.shape[1], 0.0, call.kind == "causal",
            unused, unused[0], scale=scale, **flash_window(call),
        )  # fmt: skip
