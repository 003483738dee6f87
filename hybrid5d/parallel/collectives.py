"""Collectives over one `Axis`, plain and differentiable.

Plain ones (`all_reduce`, `all_gather_seq`, `reduce_scatter_seq`, …) return a handle to be waited for, so that callers
can compute meanwhile. Differentiable ones carry Megatron's names (`copy_to_tp`, `reduce_from_tp`, …;
github.com/NVIDIA/Megatron-LM, core/tensor_parallel/mappings.py) and take the axis as an argument.

On gloo a reduce-scatter built from `all_to_all_single` and an all-gather built from sends are several times faster than
gloo's own (measured, two ranks); on NCCL the native collectives are used. 16-bit sums built here add in fp32.

Shapes: b batch, s sequence (cut or whole), H hidden; n = axis.size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid5d.parallel.context import Axis


class Pending:
    """A collective under way. `wait()` returns its result; call it once."""

    def __init__(self, finish: Callable[[], Tensor]):
        self._finish = finish

    def wait(self) -> Tensor:
        return self._finish()


def _done(x: Tensor) -> Pending:
    return Pending(lambda: x)


def _on_gloo(axis: Axis) -> bool:
    return dist.get_backend(axis.group) == "gloo"


def _exchange(axis: Axis, send: Callable[[int], Tensor], recv: Callable[[int], Tensor]) -> list[Any]:
    """Post a send to and a receive from every other member; the tensors must live until the works are waited for."""
    works: list[Any] = []
    for step in range(1, axis.size):
        to, source = (axis.rank + step) % axis.size, (axis.rank - step) % axis.size
        works.append(dist.irecv(recv(source), group=axis.group, group_src=source))
        works.append(dist.isend(send(to), group=axis.group, group_dst=to))
    return works


def all_reduce(x: Tensor, axis: Axis) -> Pending:
    """Sum over the axis; every member gets bitwise the same result. `x` may be overwritten."""
    if axis.size == 1:
        return _done(x)
    x = x.contiguous()
    if axis.size == 2 and _on_gloo(axis):
        other = torch.empty_like(x)
        works = _exchange(axis, lambda _: x, lambda _: other)

        def finish() -> Tensor:
            for w in works:
                w.wait()
            return x.add_(other)  # a + b == b + a exactly, so both members agree

        return Pending(finish)
    work = dist.all_reduce(x, group=axis.group, async_op=True)

    def finish_native() -> Tensor:
        work.wait()
        return x

    return Pending(finish_native)


def all_reduce_max(x: Tensor, axis: Axis) -> Tensor:
    """Maximum over the axis, in place."""
    if axis.size > 1:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=axis.group)
    return x


def all_gather_seq(x: Tensor, axis: Axis) -> Pending:
    """[b, s/n, ...] -> [b, s, ...]: all-gather along dim 1, shards in rank order."""
    n = axis.size
    if n == 1:
        return _done(x)
    x = x.contiguous()
    out = x.new_empty((n, *x.shape))
    if _on_gloo(axis):
        out[axis.rank].copy_(x)
        works = _exchange(axis, lambda _: x, lambda source: out[source])
    else:
        works = [dist.all_gather_into_tensor(out, x, group=axis.group, async_op=True)]

    def finish() -> Tensor:
        for w in works:
            w.wait()
        b, s = x.shape[0], x.shape[1]
        if b == 1:
            return out.view(1, n * s, *x.shape[2:])
        return out.transpose(0, 1).reshape(b, n * s, *x.shape[2:])

    return Pending(finish)


def reduce_scatter_seq(x: Tensor, axis: Axis) -> Pending:
    """[b, s, ...] partial sums -> [b, s/n, ...]: reduce-scatter along dim 1; rank r gets the r-th run."""
    n = axis.size
    if n == 1:
        return _done(x)
    b, s = x.shape[0], x.shape[1]
    if s % n:
        raise ValueError(f"sequence length {s} is not a multiple of the axis size {n}")
    parts = x.reshape(b, n, s // n, *x.shape[2:]).transpose(0, 1).contiguous()
    if _on_gloo(axis):
        got = torch.empty_like(parts)
        work = dist.all_to_all_single(got, parts, group=axis.group, async_op=True)

        def finish() -> Tensor:
            work.wait()
            if n == 2 and got.dtype == torch.float32:
                return got[0] + got[1]
            return got.sum(0, dtype=torch.float32).to(got.dtype) if got.dtype != torch.float64 else got.sum(0)

        return Pending(finish)
    out = torch.empty_like(parts[0])
    native = dist.reduce_scatter_tensor(out, parts, group=axis.group, async_op=True)

    def finish_native() -> Tensor:
        native.wait()
        return out

    return Pending(finish_native)


def split_seq(x: Tensor, axis: Axis) -> Tensor:
    """[b, s, ...] -> this rank's run [b, s/n, ...]; no communication."""
    if axis.size == 1:
        return x
    size = x.shape[1] // axis.size
    return x.narrow(1, axis.rank * size, size)


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0].clone(), ctx.axis).wait(), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce(x.clone(), axis).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _GatherSeq(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_gather_seq(x, axis).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_seq(grads[0], ctx.axis).wait(), None


class _ReduceScatterSeq(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return reduce_scatter_seq(x, axis).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather_seq(grads[0], ctx.axis).wait(), None


def copy_to_tp(x: Tensor, axis: Axis) -> Tensor:
    """Identity; backward all-reduces the gradient over the axis."""
    return x if axis.size == 1 else _CopyTo.apply(x, axis)


def reduce_from_tp(x: Tensor, axis: Axis) -> Tensor:
    """All-reduce over the axis; backward is the identity."""
    return x if axis.size == 1 else _ReduceFrom.apply(x, axis)


def gather_from_sequence(x: Tensor, axis: Axis) -> Tensor:
    """[b, s/n, H] -> [b, s, H]; backward reduce-scatters."""
    return x if axis.size == 1 else _GatherSeq.apply(x, axis)


def reduce_scatter_to_sequence(x: Tensor, axis: Axis) -> Tensor:
    """Partial [b, s, H] -> summed [b, s/n, H]; backward all-gathers."""
    return x if axis.size == 1 else _ReduceScatterSeq.apply(x, axis)


def enter_tp(x: Tensor, axis: Axis, sequence_parallel: bool) -> Tensor:
    """Into a tensor-parallel region: all-gather of the sequence with SP, else a copy whose gradient is summed."""
    return gather_from_sequence(x, axis) if sequence_parallel else copy_to_tp(x, axis)


def leave_tp(x: Tensor, axis: Axis, sequence_parallel: bool) -> Tensor:
    """Out of a tensor-parallel region: reduce-scatter of the sequence with SP, else an all-reduce."""
    return reduce_scatter_to_sequence(x, axis) if sequence_parallel else reduce_from_tp(x, axis)
