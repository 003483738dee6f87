"""Faults that are planted in ranks: each is called in a rank before its engine is built, and patches one thing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch


def partial_sums_left_out() -> None:
    """Norms under SP and copies of kv heads keep each rank's own gradient."""
    from hybrid5d.engine.deepspeed import pipeline_adapter as adapter

    adapter.sum_partial_gradients = lambda *_: None  # type: ignore[assignment]


def positions_shifted() -> None:
    """The second cp rank's positions are one too high."""
    from hybrid5d.engine import engine

    whole = engine.local_batch

    def shifted(micro_batch: Any, ctx: Any, *args: Any) -> Any:
        batch = whole(micro_batch, ctx, *args)
        return replace(batch, position_ids=batch.position_ids + int(ctx.cp.rank > 0))

    engine.local_batch = shifted


def loss_times_dp() -> None:
    """The division by dp is forgotten."""
    from hybrid5d.engine import engine

    right = engine.loss_scales
    engine.loss_scales = lambda *args: [s * args[-1] for s in right(*args)]


def tied_gradient_not_summed() -> None:
    """The embedding gets the first stage's gradient only, the head the last stage's."""
    from hybrid5d.engine.deepspeed.pipeline_module import HybridPipelineModule

    HybridPipelineModule.get_tied_weights_and_groups = lambda self: []


def first_stage_a_step_late() -> None:
    """The first of several stages uses the gradient of the step before, in the first step none."""
    from hybrid5d.engine.deepspeed import pipeline_adapter as adapter

    right, kept = adapter.sum_partial_gradients, dict[int, torch.Tensor]()

    def late(params: Any, grad_of: Any) -> None:
        params = list(params)
        right(params, grad_of)
        stage = torch.distributed.get_rank() * 2 // torch.distributed.get_world_size()  # pp is the slowest axis
        for i, p in enumerate(params if torch.distributed.get_world_size() > 1 and stage == 0 else ()):
            grad = grad_of(p)
            if grad is not None:
                now = grad.clone()
                grad.copy_(kept.get(i, torch.zeros_like(grad)))
                kept[i] = now

    adapter.sum_partial_gradients = late
