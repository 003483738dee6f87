"""Collectives over one `Axis`, plain and differentiable.

Plain ones (`all_reduce`, `all_gather_seq`, `reduce_scatter_seq`, …) return a handle to be waited for, so that callers
can compute meanwhile. Differentiable ones carry Megatron's names (`copy_to_tp`, `reduce_from_tp`, …;
github.com/NVIDIA/Megatron-LM, core/tensor_parallel/mappings.py) and take the axis as an argument.

On gloo a reduce-scatter built from `all_to_all_single` and an all-gather built from sends are several times faster than
gloo's own (measured, two ranks); shared memory and NCCL have good ones. 16-bit sums built here add in fp32.

Shapes: b batch, s sequence (cut or whole), H hidden; n = axis.size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid5d.parallel.context import Axis
from hybrid5d.parallel.messages import Pending, done, exchange
from hybrid5d.shared_memory import SHM_OR_GLOO, uses_shared_memory


def _on_gloo(axis: Axis) -> bool:
    return dist.get_backend(axis.group) in ("gloo", SHM_OR_GLOO) and not uses_shared_memory(axis.group)


def all_reduce(x: Tensor, axis: Axis) -> Pending[Tensor]:
    """Sum over the axis; every member gets bitwise the same result. `x` may be overwritten."""
    if axis.size == 1:
        return done(x)
    x = x.contiguous()
    if axis.size == 2 and _on_gloo(axis):
        other, peer = torch.empty_like(x), 1 - axis.rank
        # a + b == b + a exactly, so both members agree
        return exchange(axis, [(peer, x)], [(peer, other)]).then(lambda: x.add_(other))
    return Pending([dist.all_reduce(x, group=axis.group, async_op=True)], lambda: x)


def all_reduce_max(x: Tensor, axis: Axis) -> Tensor:
    """Maximum over the axis, in place."""
    if axis.size > 1:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=axis.group)
    return x


def reduce_to(x: Tensor, axis: Axis, owner: int) -> Tensor:
    """Sum over the axis for member `owner`, in place; what the other members' tensor holds then is undefined."""
    if axis.size > 1:
        dist.reduce(x, dst=axis.ranks[owner], group=axis.group)
    return x


def sum_scalars(values: Sequence[float], axis: Axis, device: torch.device | None = None) -> list[Any]:
    """Sum each number over the axis: exact for ints, fp64 for floats (a list that mixes them is summed as floats).

    `device`: where the backend of the axis can reach it. One all-reduce.
    """
    return _reduce_scalars(values, axis, device, dist.ReduceOp.SUM)


def max_scalars(values: Sequence[float], axis: Axis, device: torch.device | None = None) -> list[Any]:
    """Maximum of each number over the axis; as `sum_scalars`."""
    return _reduce_scalars(values, axis, device, dist.ReduceOp.MAX)


def _reduce_scalars(values: Sequence[float], axis: Axis, device: torch.device | None, op: Any) -> list[Any]:
    if axis.size == 1:
        return list(values)
    dtype = torch.int64 if all(isinstance(v, int) for v in values) else torch.float64
    x = torch.tensor(values, dtype=dtype, device=device)
    dist.all_reduce(x, op=op, group=axis.group)
    return x.tolist()


def all_gather_seq(x: Tensor, axis: Axis) -> Pending[Tensor]:
    """[b, s/n, ...] -> [b, s, ...]: all-gather along dim 1, shards in rank order."""
    n = axis.size
    if n == 1:
        return done(x)
    x = x.contiguous()
    out = x.new_empty((n, *x.shape))
    if _on_gloo(axis):
        out[axis.rank].copy_(x)
        others = [(axis.rank + i) % n for i in range(1, n)]
        pending: Pending[Any] = exchange(axis, [(r, x) for r in others], [(r, out[r]) for r in others])
    else:
        pending = Pending([dist.all_gather_into_tensor(out, x, group=axis.group, async_op=True)], lambda: None)
    b, s = x.shape[0], x.shape[1]
    # [n, b, s/n, ...] -> [b, s, ...]: a view at b = 1, else one copy
    return pending.then(lambda: out.transpose(0, 1).reshape(b, n * s, *x.shape[2:]))


def reduce_scatter_seq(x: Tensor, axis: Axis) -> Pending[Tensor]:
    """[b, s, ...] partial sums -> [b, s/n, ...]: reduce-scatter along dim 1; rank r gets the r-th run."""
    n = axis.size
    if n == 1:
        return done(x)
    b, s = x.shape[0], x.shape[1]
    if s % n:
        raise ValueError(f"sequence length {s} is not a multiple of the axis size {n}")
    parts = x.reshape(b, n, s // n, *x.shape[2:]).transpose(0, 1).contiguous()
    if not _on_gloo(axis):
        out = torch.empty_like(parts[0])
        return Pending([dist.reduce_scatter_tensor(out, parts, group=axis.group, async_op=True)], lambda: out)
    got = torch.empty_like(parts)
    work = dist.all_to_all_single(got, parts, group=axis.group, async_op=True)

    def total() -> Tensor:
        if n == 2 and got.dtype == torch.float32:
            return got[0] + got[1]
        return got.sum(0, dtype=torch.float32).to(got.dtype) if got.dtype != torch.float64 else got.sum(0)

    return Pending([work], total, held=[parts])


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
