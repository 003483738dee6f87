"""Linear and embedding layers cut over the tensor-parallel axis.

After Shoeybi et al. 2019 (Megatron-LM, columns then rows) and Korthikanti et al. 2022 (sequence parallelism).
Legend: b batch, s the rank's sequence (S/cp), H hidden, I in, O out features, V padded vocabulary, n = tp size.
With `sequence_parallel` the outside of a pair of layers works on [b, s/n, H].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid5d.parallel.collectives import all_gather_seq, all_reduce, leave_tp, reduce_scatter_seq
from hybrid5d.parallel.context import Axis
from hybrid5d.parallel.pieces import Piece


def annotate(param: nn.Parameter, pieces: Sequence[Piece], *, sharded: bool, partial: bool = False) -> nn.Parameter:
    """Tag a parameter with what the rest of the system needs to know of it.

    Args:
        sharded: tp ranks hold different values. DeepSpeed's norm counts such a parameter on every tp rank
            (`tensor_model_parallel`), others on tp rank 0 only (deepspeed runtime/utils.py).
        partial: a rank's gradient covers only part of the data or heads, so pieces that several tp ranks share
            must be summed over those ranks once a step (see tensor_parallel.gradients).
    """
    param.pieces = tuple(pieces)  # type: ignore[attr-defined]
    param.tensor_model_parallel = sharded  # type: ignore[attr-defined]
    param.partial_over_tp = partial  # type: ignore[attr-defined]
    return param


def even_slice(total: int, axis: Axis, what: str) -> tuple[int, int]:
    """Start and stop of this rank's equal share of `total`.

    Raises:
        ValueError: the axis size does not divide `total`.
    """
    if total % axis.size:
        raise ValueError(f"{what}={total} is not a multiple of the tensor-parallel size {axis.size}")
    size = total // axis.size
    return axis.rank * size, (axis.rank + 1) * size


class _ColumnLinear(torch.autograd.Function):
    """y = gather(x) W^T + b. Backward starts its collectives before the weight gradient and ends them after it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, sp: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.sp, ctx.has_bias = axis, sp, bias is not None
        whole = all_gather_seq(x, axis).wait() if sp else x
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        (dy,) = grads
        x, weight = ctx.saved_tensors
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        # SP keeps only the shard of x and gathers it again: that is the memory it saves.
        whole = all_gather_seq(x, ctx.axis) if ctx.sp and need_w else None
        dx = None
        if need_x:
            partial = dy.matmul(weight)
            dx = reduce_scatter_seq(partial, ctx.axis) if ctx.sp else all_reduce(partial, ctx.axis)
        flat = dy.reshape(-1, dy.shape[-1])
        dw = None
        if need_w:
            full_x = whole.wait() if whole is not None else x
            dw = flat.t().matmul(full_x.reshape(-1, full_x.shape[-1]))
        db = flat.sum(0) if ctx.has_bias and need_b else None
        return dx.wait() if dx is not None else None, dw, db, None, None


class _RowLinear(torch.autograd.Function):
    """y = reduce(x W^T). Backward gathers dy (SP) once for both gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: Axis, sp: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.sp = axis, sp
        partial = F.linear(x, weight)
        return (reduce_scatter_seq(partial, axis) if sp else all_reduce(partial, axis)).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        dy = all_gather_seq(grads[0], ctx.axis).wait() if ctx.sp else grads[0]
        dx = dy.matmul(weight) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            dw = dy.reshape(-1, dy.shape[-1]).t().matmul(x.reshape(-1, x.shape[-1]))
        return dx, dw, None, None


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, sequence_parallel: bool) -> Tensor:
    """Functional column-parallel linear.

    x: [b, s, I] ([b, s/n, I] with SP), weight [O/n, I] -> [b, s, O/n]. Forward all-gathers x over tp with SP; backward
    all-reduces dx over tp (reduce-scatters with SP).
    """
    if axis.size == 1:
        return F.linear(x, weight, bias)
    return _ColumnLinear.apply(x, weight, bias, axis, sequence_parallel)


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, sequence_parallel: bool) -> Tensor:
    """Functional row-parallel linear.

    x: [b, s, I/n], weight [O, I/n] -> [b, s, O] all-reduced over tp ([b, s/n, O] reduce-scattered with SP); the bias is
    added once, after the sum.
    """
    if axis.size == 1:
        return F.linear(x, weight, bias)
    y = _RowLinear.apply(x, weight, axis, sequence_parallel)
    return y if bias is None else y + bias


class ColumnParallelLinear(nn.Module):
    """Linear whose output features are cut: [b, s, I] -> [b, s, O/n] (input [b, s/n, I] with SP).

    Several HF tensors can be fused: `names` and `sizes` list them in order (`gate_proj`, `up_proj`); each is cut into n
    equal runs. A plain layer passes one name.

    Raises:
        ValueError: tp does not divide one of the sizes.
    """

    def __init__(
        self,
        in_features: int,
        sizes: Sequence[int],
        names: Sequence[str],
        axis: Axis,
        *,
        bias: bool = False,
        sequence_parallel: bool = False,
    ):
        super().__init__()
        self.axis, self.sequence_parallel = axis, sequence_parallel
        w_pieces, b_pieces, offset = [], [], 0
        for name, size in zip(names, sizes, strict=True):
            start, stop = even_slice(size, axis, f"{name} out_features")
            w_pieces.append(Piece(f"{name}.weight", (size, in_features), 0, start, stop, offset))
            b_pieces.append(Piece(f"{name}.bias", (size,), 0, start, stop, offset))
            offset += stop - start
        sharded = axis.size > 1
        self.weight = annotate(nn.Parameter(torch.empty(offset, in_features)), w_pieces, sharded=sharded)
        self.bias = annotate(nn.Parameter(torch.zeros(offset)), b_pieces, sharded=sharded) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return column_linear(x, self.weight, self.bias, self.axis, self.sequence_parallel)


class RowParallelLinear(nn.Module):
    """Linear whose input features are cut: [b, s, I/n] -> [b, s, O] ([b, s/n, O] with SP).

    The bias is replicated and added after the sum; with SP its gradient is partial and summed over tp once a step.

    Raises:
        ValueError: tp does not divide in_features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        name: str,
        axis: Axis,
        *,
        bias: bool = False,
        sequence_parallel: bool = False,
    ):
        super().__init__()
        self.axis, self.sequence_parallel = axis, sequence_parallel
        start, stop = even_slice(in_features, axis, f"{name} in_features")
        piece = Piece(f"{name}.weight", (out_features, in_features), 1, start, stop)
        weight = nn.Parameter(torch.empty(out_features, stop - start))
        self.weight = annotate(weight, [piece], sharded=axis.size > 1)
        self.bias = None
        if bias:
            whole = replicated_piece(f"{name}.bias", (out_features,), axis)
            zeros = nn.Parameter(torch.zeros(out_features))
            self.bias = annotate(zeros, [whole], sharded=False, partial=sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        return row_linear(x, self.weight, self.bias, self.axis, self.sequence_parallel)


def replicated_piece(name: str, shape: tuple[int, ...], axis: Axis) -> Piece:
    """The piece of a parameter that every tp rank holds whole."""
    return Piece(name, shape, None, 0, shape[0], 0, replica=axis.rank, num_replicas=axis.size)


def padded_vocab_size(vocab_size: int, axis_size: int) -> int:
    """Vocabulary rounded up to a multiple of tp."""
    return -(-vocab_size // axis_size) * axis_size


class VocabParallelEmbedding(nn.Module):
    """Embedding with rows cut over tp: ids [b, s] -> [b, s, H] all-reduced ([b, s/n, H] reduce-scattered with SP).

    The vocabulary is padded to a multiple of tp; padding rows stay zero, have no piece and are never looked up.
    `padding_idx`: an id whose look-ups give no gradient, as in torch's Embedding.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        name: str,
        axis: Axis,
        *,
        sequence_parallel: bool = False,
        padding_idx: int | None = None,
    ):
        super().__init__()
        self.axis, self.sequence_parallel, self.vocab_size = axis, sequence_parallel, vocab_size
        self.rows = padded_vocab_size(vocab_size, axis.size) // axis.size
        self.vocab_start = axis.rank * self.rows
        stop = min(self.vocab_start + self.rows, vocab_size)
        start = min(self.vocab_start, stop)
        piece = Piece(f"{name}.weight", (vocab_size, hidden_size), 0, start, stop)
        mine = padding_idx is not None and start <= padding_idx < stop
        self.padding_idx = padding_idx - start if padding_idx is not None and mine else None
        weight = nn.Parameter(torch.zeros(self.rows, hidden_size))
        self.weight = annotate(weight, [piece], sharded=axis.size > 1)

    def forward(self, ids: Tensor) -> Tensor:
        if self.axis.size == 1:
            return F.embedding(ids, self.weight, self.padding_idx)
        local = ids - self.vocab_start
        outside = (local < 0) | (local >= self.rows)
        rows = F.embedding(local.masked_fill(outside, 0), self.weight, self.padding_idx)
        return leave_tp(rows.masked_fill(outside.unsqueeze(-1), 0.0), self.axis, self.sequence_parallel)
