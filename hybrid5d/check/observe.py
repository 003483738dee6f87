"""What a run of the engine did, put together from its ranks' shards under Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from hybrid5d.check.compare import Trace
from hybrid5d.data.types import StepBatch
from hybrid5d.engine.deepspeed.observe import before_first_update, full_gradient, full_weight
from hybrid5d.engine.engine import Engine
from hybrid5d.engine.results import StepResult
from hybrid5d.parallel.shard import Piece, pieces_of

Shards = list[tuple[Piece, np.ndarray]]


def shards(module: nn.Module, value: Callable[[nn.Parameter], Tensor | None]) -> Shards:
    """(piece, local values) of every parameter; `value(param)` may be None (no gradient)."""
    result: Shards = []
    for param in module.parameters():
        if not pieces_of(param):
            continue
        x = value(param)
        if x is None:
            continue
        whole = x.detach().float().cpu().view(getattr(param, "ds_shape", param.shape))
        result += [(piece, piece.local_view(whole).numpy().copy()) for piece in pieces_of(param)]
    return result


def assemble(all_shards: Iterable[Shards]) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Full tensors by HF name, and by how much copies of one run differ where they are not bitwise equal.

    Raises:
        ValueError: an element that no rank holds.
    """
    full: dict[str, np.ndarray] = {}
    seen: dict[str, np.ndarray] = {}
    differ: dict[str, float] = {}
    for piece, values in (item for rank_shards in all_shards for item in rank_shards):
        target = full.setdefault(piece.name, np.zeros(piece.full_shape, np.float32))
        held = seen.setdefault(piece.name, np.zeros(piece.full_shape, bool))
        place = piece.cut.slices(piece.full_shape)
        if held[place].any() and not np.array_equal(target[place], values, equal_nan=True):
            differ[piece.name] = max(differ.get(piece.name, 0.0), float(np.abs(target[place] - values).max()))
        target[place], held[place] = values, True
    if missing := [name for name, held in seen.items() if not held.all()]:
        raise ValueError(f"parts that no rank holds: {', '.join(missing)}")
    return full, differ


@dataclass(frozen=True)
class RankRun:
    """One rank's part of a run."""

    results: list[StepResult]
    grads: Shards
    weights: Shards


def train(engine: Engine, batches: Iterable[StepBatch]) -> RankRun:
    """Train over the batches, with a look at the first gradients and the last weights. Collective over the world."""
    first: Shards = []
    before_first_update(engine.ds, lambda: first.extend(shards(engine.module, full_gradient)))
    results = [engine.train_batch(batch) for batch in batches]
    precision, zero = engine.plan.precision.dtype, engine.plan.zero_stage
    return RankRun(results, first, shards(engine.module, lambda p: full_weight(p, precision, zero)))


def joined(ranks: Sequence[RankRun]) -> Trace:
    """The whole run.

    Raises:
        ValueError: ranks report different losses or norms.
    """
    said = [[(r.loss, r.grad_norm, r.valid_tokens) for r in rank.results] for rank in ranks]
    if repr(said) != repr([said[0]] * len(said)):  # as text: NaN is equal to itself
        raise ValueError("ranks disagree on loss or norm")
    (grads, differ), (weights, apart) = assemble(r.grads for r in ranks), assemble(r.weights for r in ranks)
    return Trace([x[0] for x in said[0]], [x[1] for x in said[0]], grads, weights, {**apart, **differ})
