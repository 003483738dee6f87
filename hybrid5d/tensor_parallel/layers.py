"""Linear and embedding layers cut over the tensor-parallel axis; each takes its process group (or Axis) as an argument.

After Shoeybi et al. 2019 (Megatron-LM, columns then rows) and Korthikanti et al. 2022 (sequence parallelism).
Legend: b batch, s the rank's sequence (S/cp), H hidden, I in, O out features, V padded vocabulary, n = tp size.
With `sequence_parallel` the outside of a pair of layers works on [b, s/n, H].

Example, n = 2, b 1, s 8: x [1, 8, 16] (SP: [1, 4, 16]) -> ColumnParallelLinear(16, 64) [1, 8, 32] -> any pointwise
function -> RowParallelLinear(64, 16) [1, 8, 16] (SP: [1, 4, 16]).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid5d.parallel.collectives import all_gather_seq, all_reduce, leave_tp, reduce_scatter_seq
from hybrid5d.parallel.context import Axis
from hybrid5d.parallel.shard import Piece, Shard, fill_pieces, shard_of
from hybrid5d.plan.cut import Cut
from hybrid5d.tensor_parallel.gradients import annotate, replicated
from hybrid5d.tensor_parallel.loss import VocabShard
from hybrid5d.tensor_parallel.weight_gradients import gradients_of

Group = Axis | dist.ProcessGroup | None


class _ColumnLinear(torch.autograd.Function):
    """y_i = gather(x) W_i^T + b_i for weights that read the same x: one collective each way serves them all.

    Backward starts its collectives before the weight gradients and ends them after. Weights are kept as they are, not
    as saved tensors: recomputation would save copies, which nothing is attached to.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, sp: bool, *params: Tensor | None) -> tuple[Tensor, ...]:
        ctx.weights, biases = [w for w in params[::2] if w is not None], params[1::2]
        ctx.save_for_backward(x)
        ctx.axis, ctx.sp = axis, sp
        whole = all_gather_seq(x, axis).wait() if sp else x
        return tuple(F.linear(whole, w, b) for w, b in zip(ctx.weights, biases))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        need_x, _, _, *needs = ctx.needs_input_grad
        need_w, need_b = needs[::2], needs[1::2]
        taken = gradients_of(ctx.weights[0])
        # SP keeps only the shard of x and gathers it again: that is the memory it saves.
        gathered = None
        if ctx.sp and any(need_w):
            gathered = all_gather_seq(x, ctx.axis) if taken is None else taken.gather(x, ctx.axis)
        dx = None
        if need_x:
            partial = dys[0].matmul(ctx.weights[0])
            for dy, w in zip(dys[1:], ctx.weights[1:]):
                partial.view(-1, partial.shape[-1]).addmm_(dy.reshape(-1, dy.shape[-1]), w)
            dx = reduce_scatter_seq(partial, ctx.axis) if ctx.sp else all_reduce(partial, ctx.axis)
        dws: list[Tensor | None] = [None] * len(dys)
        if taken is not None:
            pairs = [(w, dy) for w, dy, need in zip(ctx.weights, dys, need_w) if need]
            if pairs:
                taken.products(pairs, x, ctx.axis if ctx.sp else None, gathered)
        elif any(need_w):
            whole = (x if gathered is None else gathered.wait()).flatten(0, -2)
            dws = [dy.flatten(0, -2).t().matmul(whole) if need else None for dy, need in zip(dys, need_w)]
        dbs = [dy.flatten(0, -2).sum(0) if need else None for dy, need in zip(dys, need_b)]
        pairs_of = (g for pair in zip(dws, dbs) for g in pair)
        return dx.wait() if dx is not None else None, None, None, *pairs_of


class _RowLinear(torch.autograd.Function):
    """y = reduce(x W^T). Backward gathers dy (SP) once for both gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: Axis, sp: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.axis, ctx.sp = weight, axis, sp
        partial = F.linear(x, weight)
        return (reduce_scatter_seq(partial, axis) if sp else all_reduce(partial, axis)).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        dy = all_gather_seq(grads[0], ctx.axis).wait() if ctx.sp else grads[0]
        dx = dy.matmul(ctx.weight) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dx, None, None, None
        taken = gradients_of(ctx.weight)
        if taken is not None:
            taken.products([(ctx.weight, dy)], x)
            return dx, None, None, None
        return dx, dy.reshape(-1, dy.shape[-1]).t().matmul(x.reshape(-1, x.shape[-1])), None, None


class _Rows(torch.autograd.Function):
    """Rows of a weight, [...] -> [..., H]."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding_idx = weight, padding_idx
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        (ids,) = ctx.saved_tensors
        taken = gradients_of(ctx.weight)
        if taken is not None:
            taken.rows(ctx.weight, ids, grads[0], ctx.padding_idx)
            return None, None, None
        padding = -1 if ctx.padding_idx is None else ctx.padding_idx
        return torch.ops.aten.embedding_dense_backward(grads[0], ids, len(ctx.weight), padding, False), None, None


def column_linear(
    x: Tensor, params: Sequence[tuple[Tensor, Tensor | None]], axis: Axis, sequence_parallel: bool
) -> tuple[Tensor, ...]:
    """Column-parallel linear functions of one input; `params`: the (weight, bias) of each.

    x: [b, s, I] ([b, s/n, I] with SP), weights [O_i/n, I] -> [b, s, O_i/n] each. Forward all-gathers x over tp with SP;
    backward all-reduces dx over tp (reduce-scatters with SP), once for all.
    """
    return _ColumnLinear.apply(x, axis, sequence_parallel, *(p for pair in params for p in pair))


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, sequence_parallel: bool) -> Tensor:
    """Functional row-parallel linear.

    x: [b, s, I/n], weight [O, I/n] -> [b, s, O] all-reduced over tp ([b, s/n, O] reduce-scattered with SP); the bias is
    added once, after the sum.
    """
    y = _RowLinear.apply(x, weight, axis, sequence_parallel)
    return y if bias is None else y + bias


def _draw_linear(layer: ColumnParallelLinear | RowParallelLinear) -> None:
    """torch's values for nn.Linear: each whole tensor is drawn from the default generator, then cut."""
    bound = 1 / math.sqrt(layer.in_features)
    fill_pieces(layer, lambda piece: torch.empty(piece.full_shape).uniform_(-bound, bound))


class ColumnParallelLinear(nn.Module):
    """nn.Linear whose output features are cut: [b, s, I] -> [b, s, O/n]; with SP the input is [b, s/n, I].

    Drawn as nn.Linear is, whole and then cut: ranks with the same random state hold parts of one matrix, whatever n.

    Args:
        out_features: O, or the sizes of several matrices fused into one, each cut into n equal runs.
        group: the ranks to cut over: a process group, an Axis, or None for the default group.
        names: the names of the fused tensors in a checkpoint (`...gate_proj`, `...up_proj`). A layer with names starts
            at zero and is filled by name (`init_weights`, `load_hf_weights`), without a draw of its own.
        copies: how many neighbouring ranks hold the same share (kv heads fewer than tp); their gradients are summed.

    Raises:
        ValueError: tp (over `copies`) does not divide one of the sizes.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        group: Group = None,
        bias: bool = True,
        sequence_parallel: bool = False,
        names: Sequence[str] = (),
        copies: int = 1,
    ):
        super().__init__()
        self.axis, self.sequence_parallel = Axis.of(group), sequence_parallel
        sizes = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        self.in_features, self.out_features = in_features, sum(sizes)
        shares, mine = self.axis.size // copies, self.axis.rank // copies
        rows, biases, offset = [], [], 0
        for name, size in zip(names or ("",) * len(sizes), sizes, strict=True):
            cut = Cut.even(0, size, shares, mine, f"{name} out_features".strip())
            rows.append(Piece(name and f"{name}.weight", (size, in_features), cut, offset))
            biases.append(Piece(name and f"{name}.bias", (size,), cut, offset))
            offset += cut.length
        partial = copies > 1
        weight = nn.Parameter(torch.zeros(offset, in_features))
        self.weight = annotate(weight, Shard(tuple(rows), self.axis, copies, partial))
        self.bias = None
        if bias:
            zeros = nn.Parameter(torch.zeros(offset))
            self.bias = annotate(zeros, Shard(tuple(biases), self.axis, copies, partial))
        if not names:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new values; the same on every rank only where their random states are."""
        _draw_linear(self)

    def forward(self, x: Tensor) -> Tensor:
        return column_linear(x, [(self.weight, self.bias)], self.axis, self.sequence_parallel)[0]

    def extra_repr(self) -> str:
        return _describe(self, f"out_features={self.out_features}/{self.axis.size}")


class RowParallelLinear(nn.Module):
    """nn.Linear whose input features are cut: [b, s, I/n] -> [b, s, O]; with SP the output is [b, s/n, O].

    Drawn as nn.Linear is, whole and then cut. The bias is replicated and added after the sum; with SP each rank adds it
    to its tokens only, so its gradient is summed over tp. `group`, `name` as in ColumnParallelLinear.

    Raises:
        ValueError: tp does not divide in_features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: Group = None,
        bias: bool = True,
        sequence_parallel: bool = False,
        name: str = "",
    ):
        super().__init__()
        self.axis, self.sequence_parallel = Axis.of(group), sequence_parallel
        self.in_features, self.out_features = in_features, out_features
        cut = Cut.even(1, in_features, self.axis.size, self.axis.rank, f"{name} in_features".strip())
        piece = Piece(name and f"{name}.weight", (out_features, in_features), cut)
        self.weight = annotate(nn.Parameter(torch.zeros(out_features, cut.length)), Shard((piece,), self.axis))
        self.bias = None
        if bias:
            zeros = nn.Parameter(torch.zeros(out_features))
            self.bias = replicated(zeros, self.axis, name and f"{name}.bias", partial=sequence_parallel)
        if not name:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new values; the same on every rank only where their random states are."""
        _draw_linear(self)

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is not None and self.sequence_parallel and shard_of(self.bias) is None:
            raise RuntimeError("this copy of the bias lost the sum of its gradient (deepcopy): build the layer anew")
        return row_linear(x, self.weight, self.bias, self.axis, self.sequence_parallel)

    def extra_repr(self) -> str:
        return _describe(self, f"out_features={self.out_features}", f"/{self.axis.size}")


def _describe(layer: ColumnParallelLinear | RowParallelLinear, out: str, cut: str = "") -> str:
    sp = ", sequence_parallel=True" if layer.sequence_parallel else ""
    return f"in_features={layer.in_features}{cut}, {out}, bias={layer.bias is not None}{sp}"


class VocabParallelEmbedding(nn.Module):
    """nn.Embedding with rows cut over tp: ids [b, s] -> [b, s, H] all-reduced ([b, s/n, H] reduce-scattered with SP).

    The vocabulary is padded to a multiple of tp; padding rows stay zero, have no piece and are never looked up.
    Drawn as nn.Embedding is, whole and then cut. `group`, `name` as in ColumnParallelLinear.

    Args:
        padding_idx: an id whose look-ups give no gradient, as in torch's Embedding.

    Attributes:
        vocab: which columns of the logits this rank holds where the matrix serves as the head (tied embeddings).
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        group: Group = None,
        sequence_parallel: bool = False,
        padding_idx: int | None = None,
        name: str = "",
    ):
        super().__init__()
        self.axis, self.sequence_parallel = Axis.of(group), sequence_parallel
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.vocab = VocabShard.of(num_embeddings, self.axis)
        start, rows = self.vocab.start, self.vocab.size
        cut = Cut(0, min(start, num_embeddings), min(start + rows, num_embeddings))
        here = padding_idx is not None and cut.start <= padding_idx < cut.stop
        self.padding_idx = padding_idx - start if padding_idx is not None and here else None
        piece = Piece(name and f"{name}.weight", (num_embeddings, embedding_dim), cut)
        self.weight = annotate(nn.Parameter(torch.zeros(rows, embedding_dim)), Shard((piece,), self.axis))
        if not name:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new values (normal, as nn.Embedding); the padding row is zero."""
        fill_pieces(self, lambda piece: torch.empty(piece.full_shape).normal_())
        if self.padding_idx is not None:
            with torch.no_grad():
                self.weight[self.padding_idx].zero_()

    def forward(self, ids: Tensor) -> Tensor:
        if self.axis.size == 1:
            return _Rows.apply(self.weight, ids, self.padding_idx)
        local, here = self.vocab.columns(ids)
        rows = _Rows.apply(self.weight, local, self.padding_idx)
        return leave_tp(rows.masked_fill(~here.unsqueeze(-1), 0.0), self.axis, self.sequence_parallel)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}/{self.axis.size}, {self.embedding_dim}"
