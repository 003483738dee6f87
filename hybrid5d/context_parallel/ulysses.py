"""Ulysses: trade sequence for heads with one all-to-all before attention and one after.

The long tensors lie as [n, s, b, heads/n, d], a part per rank: contiguous parts, and [b, n*s, heads/n, d] is a view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybrid5d.context_parallel.transport import accumulate_dtype
from hybrid5d.parallel.context import Axis
from hybrid5d.parallel.messages import Traffic, exchange


def _check(q_heads: int, kv_heads: int, degree: int) -> None:
    if q_heads % degree:
        raise ValueError(f"{q_heads} local query heads do not divide by Ulysses degree {degree}")
    if kv_heads % degree and degree % kv_heads:
        raise ValueError(f"{kv_heads} local kv heads and Ulysses degree {degree}: one must divide the other")


def _parts(x: Tensor, degree: int) -> Tensor:
    """[b, s, n, d] -> view [degree, s, b, n/degree, d]: the heads of each rank."""
    return x.unflatten(2, (degree, -1)).permute(2, 1, 0, 3, 4)


def _kv_parts(x: Tensor, degree: int) -> Tensor:
    """The same for keys or values; fewer heads than ranks are repeated: [degree, s, b, max(n/degree, 1), d]."""
    b, s, n, d = x.shape
    if n >= degree:
        return _parts(x, degree)
    return _parts(x[:, :, :, None].expand(b, s, n, degree // n, d).flatten(2, 3), degree)


def _long_parts(x: Tensor, degree: int) -> Tensor:
    """[b, degree*s, n, d] -> view [degree, s, b, n, d]: the sequence of each rank."""
    return x.transpose(0, 1).unflatten(0, (degree, -1))


def _long(x: Tensor) -> Tensor:
    """[degree, s, b, n, d] -> view [b, degree*s, n, d]."""
    return x.flatten(0, 1).transpose(0, 1)


def all_to_all(axis: Axis, sources: Sequence[Tensor], targets: Sequence[Tensor], traffic: Traffic | None) -> None:
    """For every pair: targets[i][r] = sources[i][own index] of rank r. Both are views [n, ...] with any strides.

    Pairwise messages, as NCCL does inside: the own part is copied once and touches no buffer, contiguous parts are sent
    from and received into their place, and large fresh buffers (page faults on CPU) are few.
    """
    peers = [(axis.rank + i) % axis.size for i in range(1, axis.size)]
    sends = [(p, x[p].contiguous()) for p in peers for x in sources]
    places = [(p, y[p]) for p in peers for y in targets]
    receives = [(p, y if y.is_contiguous() else y.new_empty(y.shape)) for p, y in places]
    pending = exchange(axis, sends, receives, traffic, "all_to_all")
    for x, y in zip(sources, targets):
        y[axis.rank].copy_(x[axis.rank])
    pending.wait()
    for (_, place), (_, received) in zip(places, receives):
        if received is not place:
            place.copy_(received)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis, traffic: Traffic | None) -> tuple[Tensor, ...]:
        ctx.axis, ctx.traffic, ctx.shape = axis, traffic, (q.shape, k.shape)
        parts = [_parts(q, axis.size), _kv_parts(k, axis.size), _kv_parts(v, axis.size)]
        received = [x.new_empty(x.shape) for x in parts]
        all_to_all(axis, parts, received, traffic)
        return tuple(map(_long, received))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        n = ctx.axis.size
        q_shape, (b, s, kv, d) = ctx.shape
        wide = (b, s, max(kv, n), d)
        dq, dk, dv = (g.new_empty(shape) for g, shape in zip(grads, (q_shape, wide, wide)))
        all_to_all(ctx.axis, [_long_parts(g, n) for g in grads], [_parts(x, n) for x in (dq, dk, dv)], ctx.traffic)
        if kv < n:  # the copies of a head sum
            total = accumulate_dtype(dk.dtype)
            dk, dv = (x.view(b, s, kv, n // kv, d).sum(3, dtype=total).to(x.dtype) for x in (dk, dv))
        return dq, dk, dv, None, None


class _ToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, axis: Axis, traffic: Traffic | None) -> Tensor:
        ctx.axis, ctx.traffic = axis, traffic
        b, s, heads, d = out.shape
        result = out.new_empty(b, s // axis.size, heads * axis.size, d)
        all_to_all(axis, [_long_parts(out, axis.size)], [_parts(result, axis.size)], traffic)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        parts = _parts(grads[0], ctx.axis.size)
        received = parts.new_empty(parts.shape)
        all_to_all(ctx.axis, [parts], [received], ctx.traffic)
        return _long(received), None, None


def to_heads(q: Tensor, k: Tensor, v: Tensor, axis: Axis, traffic: Traffic | None = None) -> tuple[Tensor, ...]:
    """q [b, s, nq, d], k, v [b, s, nkv, d] -> q [b, n*s, nq/n, d], k, v [b, n*s, max(nkv/n, 1), d] over an axis of n.

    One all-to-all for the three; backward likewise, summing dk and dv over the copies of a repeated kv head.

    Raises:
        ValueError: heads that do not divide.
    """
    if axis.size == 1:
        return q, k, v
    _check(q.shape[2], k.shape[2], axis.size)
    return _ToHeads.apply(q, k, v, axis, traffic)


def to_sequence(out: Tensor, axis: Axis, traffic: Traffic | None = None) -> Tensor:
    """[b, n*s, nq/n, d] -> [b, s, nq, d]: undoes `to_heads`; one all-to-all, backward likewise."""
    return out if axis.size == 1 else _ToSequence.apply(out, axis, traffic)
