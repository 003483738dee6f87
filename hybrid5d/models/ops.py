"""Pointwise pieces of a decoder with hand-written backwards: fewer passes over memory than autograd's, same numbers.

Legend: b batch, s sequence, H hidden, h heads, d head dimension, I feed-forward size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        inv = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normed = (wide * inv).to(x.dtype)
        ctx.save_for_backward(normed, weight, inv)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (dy,) = grads
        normed, weight, inv = ctx.saved_tensors
        dw = None
        if ctx.needs_input_grad[1]:
            dw = (dy * normed).reshape(-1, normed.shape[-1]).sum(0, dtype=inv.dtype).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, dw, None
        wide, dn = normed.to(inv.dtype), (dy * weight).to(inv.dtype)
        mean = (dn * wide).mean(-1, keepdim=True)
        return (dn - wide * mean).mul_(inv).to(dy.dtype), dw, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, statistics in fp32 (Zhang & Sennrich 2019)."""
    return _RMSNorm.apply(x, weight, eps)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (dy,) = grads
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        out = torch.empty_like(gate_up)
        d_gate, d_up = out.chunk(2, -1)
        sig = torch.sigmoid(gate)
        silu = gate * sig
        torch.mul(dy, silu, out=d_up)
        # silu'(g) = sig + silu * (1 - sig)
        silu.mul_(1 - sig).add_(sig).mul_(up)
        torch.mul(dy, silu, out=d_gate)
        return out


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2I] (gate then up) -> silu(gate) * up [..., I] (Shazeer 2020)."""
    return _SwiGLU.apply(gate_up)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    x1, x2 = x[..., :half], x[..., half:]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.mul(x1, cos, out=out[..., :half])
    out[..., :half].addcmul_(x2, sin, value=-1)
    torch.mul(x2, cos, out=out[..., half:])
    out[..., half:].addcmul_(x1, sin)
    return out


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, -sin), None, None


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [b, s, h, d] by cos, sin [b, s, 1, d/2]; the two halves of d form the pairs (HF's layout)."""
    return _Rotary.apply(x, cos, sin)
