"""Tensor and sequence parallelism on plain process groups: layers, token losses, and what one's own layers need.

Layers take a process group (or an Axis, or None for the default group) and look like torch's: see
examples/tensor_parallel_mlp.py. Between a column-parallel and a row-parallel layer activations are cut by features;
with `sequence_parallel` they are cut along the sequence outside. A replicated parameter that sees only part of the
sequence there (a norm) is declared with `replicated(..., partial=True)`, which sums its gradient.
"""

from hybrid5d.parallel.collectives import (
    copy_to_tp,
    enter_tp,
    gather_from_sequence,
    leave_tp,
    reduce_from_tp,
    reduce_scatter_to_sequence,
    split_seq,
)
from hybrid5d.parallel.context import Axis
from hybrid5d.parallel.shard import Piece, Shard
from hybrid5d.plan.cut import Cut
from hybrid5d.tensor_parallel.gradients import annotate, defer_partial_sums, replicated, sum_partial_gradients
from hybrid5d.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    column_linear,
    row_linear,
)
from hybrid5d.tensor_parallel.loss import (
    CROSS_ENTROPY,
    IGNORE_INDEX,
    HeadOptions,
    TokenLoss,
    TokenRule,
    TokenTerms,
    VocabShard,
    linear_cross_entropy,
    linear_logprobs,
    linear_token_loss,
)
from hybrid5d.tensor_parallel.value import linear_value_loss, linear_values
from hybrid5d.tensor_parallel.weight_gradients import Place, WeightGradients

__all__ = [
    "CROSS_ENTROPY",
    "IGNORE_INDEX",
    "Axis",
    "ColumnParallelLinear",
    "Cut",
    "HeadOptions",
    "Piece",
    "Place",
    "RowParallelLinear",
    "Shard",
    "TokenLoss",
    "TokenRule",
    "TokenTerms",
    "VocabParallelEmbedding",
    "VocabShard",
    "WeightGradients",
    "annotate",
    "column_linear",
    "copy_to_tp",
    "defer_partial_sums",
    "enter_tp",
    "gather_from_sequence",
    "leave_tp",
    "linear_cross_entropy",
    "linear_logprobs",
    "linear_token_loss",
    "linear_value_loss",
    "linear_values",
    "reduce_from_tp",
    "reduce_scatter_to_sequence",
    "replicated",
    "row_linear",
    "split_seq",
    "sum_partial_gradients",
]
