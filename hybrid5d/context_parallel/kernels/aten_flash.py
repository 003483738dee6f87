"""aten's flash attention for CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybrid5d.context_parallel.kernels.varlen import Offsets, VarlenCall, VarlenKernel


class AtenFlashKernel(VarlenKernel):
    """aten's flash attention for CUDA: fp16 and bf16, GQA and windows native, d a multiple of 8 up to 256.

    One block is a dense call, which needs no offsets; several are one call of variable length.
    """

    name = "aten_flash"
    dense = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float) -> tuple[Tensor, Tensor]:
        if call.offsets is not None:
            return super().forward(q, k, v, call, scale)
        return self._forward((q, k, v), (None, None), call, scale)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if call.offsets is not None:
            return super().backward(dout, q, k, v, out, lse, call, scale)
        return self._backward((dout, q, k, v, out), lse.contiguous(), (None, None), call, scale)

    def varlen_forward(
        self, flat: Sequence[Tensor], offsets: Offsets, call: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor]:
        return self._forward(flat, offsets, call, scale)

    def varlen_backward(
        self, flat: Sequence[Tensor], lse: Tensor, offsets: Offsets, call: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._backward(flat, lse, offsets, call, scale)

    def _forward(
        self, qkv: Sequence[Tensor], offsets: tuple[Any, Any], call: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *qkv, *offsets, max(call.row_counts), max(call.key_counts), 0.0, call.causal, False, scale=scale,
            window_size_left=call.left, window_size_right=call.right,
        )  # fmt: skip
        return out, lse

    def _backward(
        self, given: Sequence[Tensor], lse: Tensor, offsets: tuple[Any, Any], call: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        unused = torch.empty(2, dtype=torch.uint64, device=lse.device)  # random state of dropout, which is 0
        return torch.ops.aten._flash_attention_backward(
            *given, lse, *offsets, max(call.row_counts), max(call.key_counts), 0.0, call.causal, unused, unused[0],
            scale=scale, window_size_left=call.left, window_size_right=call.right,
        )  # fmt: skip
