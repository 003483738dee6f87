"""Attention kernels that return (out, lse) and have a backward that takes both from outside.

All tensors are [b, s, heads, d] with any strides (last one 1); lse is [b, heads, s] fp32. A kernel computes one `Block`
of the plan on slices that the caller cut. GQA: fewer kv heads than query heads, never expanded by the caller.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from hybrid5d.plan.sequence_blocks import Block


class Kernel(Protocol):
    """One way to compute a block."""

    name: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
        """q [b, m, nq, d], k, v [b, n, nkv, d] -> out [b, m, nq, d], lse [b, nq, m]."""

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k, v through this block, given the final out and lse of its rows."""


class AtenCpuKernel:
    """aten's flash attention for CPU: fp32, fp64, bf16, fp16; GQA native; fp32 lse (fp64 for fp64)."""

    name = "aten_cpu"

    def __init__(self) -> None:
        self._masks: dict[tuple[object, ...], Tensor] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, block.kind == "causal",
            attn_mask=self._mask(block, q), scale=scale,
        )  # fmt: skip
        return out.transpose(1, 2), lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout.transpose(1, 2), q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), out.transpose(1, 2), lse,
            0.0, block.kind == "causal", attn_mask=self._mask(block, q), scale=scale,
        )  # fmt: skip
        dq, dk, dv = (g.transpose(1, 2) for g in grads)
        return dq, dk, dv

    def _mask(self, block: Block, q: Tensor) -> Tensor | None:
        if block.kind != "band":
            return None
        key = (block.q1 - block.q0, block.k1 - block.k0, block.shift, block.window, q.dtype)
        if key not in self._masks:
            if len(self._masks) >= 64:
                self._masks.clear()
            self._masks[key] = band_mask(block, q.dtype, q.device)
        return self._masks[key]


def band_mask(block: Block, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive mask [1, 1, m, n] of a band block: 0 where allowed, -inf elsewhere."""
    rows = torch.arange(block.q1 - block.q0, device=device)[:, None] + block.shift
    age = rows - torch.arange(block.k1 - block.k0, device=device)
    mask = torch.zeros(age.shape, dtype=dtype, device=device)
    return mask.masked_fill_((age < 0) | (age >= block.window), float("-inf"))[None, None]


def choose_kernel(name: str, device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel of that name, or with `auto` the best one for tensors of this device and dtype.

    Raises:
        ValueError: unknown name.
    """
    if name in ("auto", "aten_cpu"):
        return AtenCpuKernel()
    raise ValueError(f"attention kernel {name!r}")
