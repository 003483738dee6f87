"""The seam to DeepSpeed: two engines that run one optimizer step over given micro-batches.

`PipelineAdapter` (ZeRO 0/1, any pp) is DeepSpeed's pipeline engine under our programs, `PlainAdapter` (ZeRO 2/3, pp 1)
its plain engine. Both have `train_step`, `infer` and `divisor`. Comments cite the headings of docs/deepspeed.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import GatheredParameters
from torch import Tensor, nn

from hybrid5d.engine.deepspeed.nonfinite import END, Inspected
from hybrid5d.engine.deepspeed.optimizer_state import dynamic_scale, loss_scale
from hybrid5d.engine.deepspeed.pipeline_adapter import PipelineAdapter
from hybrid5d.engine.deepspeed.pipeline_module import HybridPipelineModule
from hybrid5d.engine.recorder import Recorder
from hybrid5d.generation.stage import Gather, as_they_are
from hybrid5d.models.batch import LocalBatch
from hybrid5d.parallel.context import ParallelContext
from hybrid5d.plan.run import RunPlan


class PlainAdapter(Inspected, DeepSpeedEngine):
    """The plain engine at pp 1 for ZeRO 2 and 3, which reduce gradients while backward runs.

    Partial gradients are therefore summed over tp in the backward pass itself, as the layers do by default
    (deepspeed.md: Sums over tp).
    """

    products = False

    def __init__(self, ctx: ParallelContext, **kwargs: Any):
        super().__init__(**kwargs)
        self.ctx = ctx
        if hasattr(self.optimizer, "check_grad_overflow"):  # off in bf16 (deepspeed.md: Skipped steps)
            self.optimizer.check_grad_overflow = True
        if self.zero_optimization_stage() == 3:
            self._count_replicas_once()

    @property
    def gather(self) -> Gather:
        """Makes parameters whole for a while."""
        return GatheredParameters if self.zero_optimization_stage() == 3 else as_they_are

    def _count_replicas_once(self) -> None:
        """Hand ZeRO 3's norm zeros for copies of kv heads (deepspeed.md: What the norm counts)."""
        norm_of = self.optimizer.get_grad_norm_direct

        def count_once(gradients: list[Tensor], params: list[nn.Parameter], *args: Any, **kwargs: Any) -> Tensor:
            kept = [
                torch.zeros_like(g) if getattr(p, "ds_pipe_replicated", False) else g for g, p in zip(gradients, params)
            ]
            return norm_of(kept, params, *args, **kwargs)

        self.optimizer.get_grad_norm_direct = count_once

    @property
    def divisor(self) -> int:
        """What gradients are divided by: the accumulation steps of DeepSpeed's config, and a mean over dp x cp."""
        return self.gradient_accumulation_steps() * self.ctx.dp_cp.size

    def train_step(self, batches: Sequence[LocalBatch], scales: Sequence[float]) -> Tensor:
        self.module.train()
        self.total_loss = torch.zeros((), dtype=torch.float32, device=self.device)
        for i, (batch, scale) in enumerate(zip(batches, scales, strict=True)):
            last = i == len(batches) - 1
            self.set_gradient_accumulation_boundary(last)
            batch.upstream = _upstream(self, scale)
            if self.inspector is not None:
                self.inspector.begin(i, batch)
            loss = self._forward_pass(batch) * scale
            if self.inspector is not None:
                self.inspector.check(loss, "loss", END)
            self.total_loss += loss.detach().float()
            self.backward(loss)
            if last:
                self._update()
            else:
                self.step()  # only counts
        return self.total_loss

    def _forward_pass(self, batch: LocalBatch) -> Tensor:
        return DeepSpeedEngine.forward(self, None, batch)

    def _update(self) -> None:
        self.step()

    @contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """Inside, every pass and the update are timed."""
        names = {"_forward_pass": "F", "backward": "X", "_update": "update"}
        for name, op in names.items():
            setattr(self, name, recorder.timed(op, getattr(self, name)))
        try:
            yield
        finally:
            for name in names:
                delattr(self, name)

    def infer(self, batches: Sequence[LocalBatch]) -> list[Any]:
        self.module.eval()
        with torch.no_grad():
            return [DeepSpeedEngine.forward(self, None, batch) for batch in batches]


def _upstream(engine: DeepSpeedEngine, scale: float) -> float:
    """What DeepSpeed calls backward of a micro-batch's loss with, where that is multiplied by `scale` first."""
    return scale * loss_scale(engine.optimizer) / engine.gradient_accumulation_steps()


def build_adapter(
    module: HybridPipelineModule,
    ctx: ParallelContext,
    plan: RunPlan,
    parameter_groups: list[dict[str, Any]],
    dtype: torch.dtype,
) -> PipelineAdapter | PlainAdapter:
    """The engine for the plan's ZeRO stage, built directly (deepspeed.md: No subclass through `initialize`)."""
    from deepspeed.runtime.config import DeepSpeedConfig

    mpu = module.mpu()
    assert not hasattr(mpu, "get_sequence_parallel_world_size"), "gradients rescaled (deepspeed.md: Ulysses names)"
    common: dict[str, Any] = {
        "args": None,
        "model": module,
        "model_parameters": parameter_groups,
        "mpu": mpu,  # also at pp 1 (deepspeed.md: mpu at pp 1)
        "config": plan.deepspeed,
        "config_class": DeepSpeedConfig(plan.deepspeed, mpu),
        "dont_change_device": True,
    }
    engine: PipelineAdapter | PlainAdapter
    if plan.zero_stage >= 2:
        engine = PlainAdapter(ctx, **common)
    else:
        engine = PipelineAdapter(ctx, dtype, plan.pipeline, **common)
    if dynamic_scale(engine.optimizer):
        engine.optimizer.loss_scaler.raise_error_at_min_scale = False  # with a bare Exception; the trainer says it
    return engine
