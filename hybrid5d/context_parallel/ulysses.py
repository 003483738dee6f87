"""Ulysses: trade sequence for heads with one all-to-all before attention and one after.

On the wire the layout is [destination, S, b, heads, d], so that what arrives is already the longer sequence: a view.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybrid5d.context_parallel.comm import Traffic, all_to_all
from hybrid5d.parallel.context import Axis


def kv_heads_per_rank(num_kv_heads: int, degree: int) -> int:
    """kv heads each Ulysses rank attends with: its share, or one where there are fewer heads than ranks.

    Raises:
        ValueError: neither divides the other, so a rank's query heads would need parts of several groups.
    """
    if num_kv_heads % degree and degree % num_kv_heads:
        raise ValueError(f"{num_kv_heads} local kv heads and Ulysses degree {degree}: one must divide the other")
    return max(1, num_kv_heads // degree)


def _repeat_heads(x: Tensor, degree: int) -> Tensor:
    """[b, s, n, d] with n < degree -> [b, s, degree, d], each head degree/n times in a row: a view where expanded."""
    b, s, n, d = x.shape
    return x if n >= degree else x[:, :, :, None].expand(b, s, n, degree // n, d).reshape(b, s, degree, d)


def _split_heads(x: Tensor, degree: int) -> Tensor:
    """[b, s, n, d] -> view [degree, s, b, n/degree, d]."""
    b, s, n, d = x.shape
    return x.view(b, s, degree, n // degree, d).permute(2, 1, 0, 3, 4)


def _long(x: Tensor) -> Tensor:
    """[degree, s, b, n, d] -> view [b, degree*s, n, d]."""
    return x.flatten(0, 1).transpose(0, 1)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis, traffic: Traffic | None) -> tuple[Tensor, ...]:
        ctx.axis, ctx.traffic, ctx.shape = axis, traffic, (q.shape, k.shape)
        n = axis.size
        parts = [_split_heads(q.contiguous(), n)]
        parts += [_split_heads(_repeat_heads(x, n).contiguous(), n) for x in (k, v)]
        received = all_to_all(axis, torch.cat(parts, dim=3), traffic)
        ctx.widths = [p.shape[3] for p in parts]
        return tuple(_long(x) for x in received.split(ctx.widths, dim=3))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        n = ctx.axis.size
        q_shape, k_shape = ctx.shape
        b, s, kv, d = k_shape
        send = torch.cat([g.transpose(0, 1).unflatten(0, (n, s)) for g in grads], dim=3)
        received = all_to_all(ctx.axis, send, ctx.traffic)  # [n, s, b, heads of a rank, d]
        dq, dk, dv = (x.permute(2, 1, 0, 3, 4) for x in received.split(ctx.widths, dim=3))  # [b, s, n, heads, d]
        if kv < n:  # the copies of a head sum
            wide = torch.float32 if dk.dtype in (torch.bfloat16, torch.float16) else dk.dtype
            dk, dv = (x.reshape(b, s, kv, n // kv, d).sum(3, dtype=wide).to(x.dtype) for x in (dk, dv))
        return dq.reshape(q_shape), dk.reshape(k_shape), dv.reshape(k_shape), None, None


class _ToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, axis: Axis, traffic: Traffic | None) -> Tensor:
        ctx.axis, ctx.traffic = axis, traffic
        n = axis.size
        send = out.transpose(0, 1).unflatten(0, (n, out.shape[1] // n)).contiguous()
        received = all_to_all(axis, send, traffic)  # [n, s, b, heads/n, d]
        return received.permute(2, 1, 0, 3, 4).flatten(2, 3)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        send = _split_heads(grads[0].contiguous(), ctx.axis.size).contiguous()
        return _long(all_to_all(ctx.axis, send, ctx.traffic)), None, None


def to_heads(q: Tensor, k: Tensor, v: Tensor, axis: Axis, traffic: Traffic | None = None) -> tuple[Tensor, ...]:
    """q [b, s, nq, d], k, v [b, s, nkv, d] -> q [b, n*s, nq/n, d], k, v [b, n*s, max(nkv/n, 1), d] over an axis of n.

    One all-to-all for the three; backward likewise, summing dk and dv over the copies of a repeated kv head.

    Raises:
        ValueError: heads that do not divide.
    """
    if axis.size == 1:
        return q, k, v
    if q.shape[2] % axis.size:
        raise ValueError(f"{q.shape[2]} local query heads do not divide by Ulysses degree {axis.size}")
    kv_heads_per_rank(k.shape[2], axis.size)
    return _ToHeads.apply(q, k, v, axis, traffic)


def to_sequence(out: Tensor, axis: Axis, traffic: Traffic | None = None) -> Tensor:
    """[b, n*s, nq/n, d] -> [b, s, nq, d]: undoes `to_heads`; one all-to-all, backward likewise."""
    return out if axis.size == 1 else _ToSequence.apply(out, axis, traffic)
