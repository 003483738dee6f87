"""Tensor- and sequence-parallel layers; each takes its `Axis` as an argument and works alone."""

from hybrid5d.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    annotate,
    column_linear,
    padded_vocab_size,
    replicated_piece,
    row_linear,
)
from hybrid5d.tensor_parallel.loss import (
    IGNORE_INDEX,
    VocabShard,
    linear_cross_entropy,
    linear_logprobs,
    vocab_parallel_argmax,
    vocab_parallel_cross_entropy,
)

__all__ = [
    "IGNORE_INDEX",
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabShard",
    "annotate",
    "column_linear",
    "linear_cross_entropy",
    "linear_logprobs",
    "padded_vocab_size",
    "replicated_piece",
    "row_linear",
    "vocab_parallel_argmax",
    "vocab_parallel_cross_entropy",
]
