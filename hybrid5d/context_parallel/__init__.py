"""Context parallelism: attention over a cut sequence, for plain tensors and process groups, without the engine."""

from hybrid5d.context_parallel.attention import (
    ContextParallelAttention,
    hybrid_axes,
    ring_attention,
    ulysses_attention,
)
from hybrid5d.context_parallel.kernels import choose_kernel
from hybrid5d.parallel.messages import Traffic
from hybrid5d.plan.sequence import SequencePlan

__all__ = [
    "ContextParallelAttention",
    "SequencePlan",
    "Traffic",
    "choose_kernel",
    "hybrid_axes",
    "ring_attention",
    "ulysses_attention",
]
