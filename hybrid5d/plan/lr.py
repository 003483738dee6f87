"""Learning rate and weight decay per optimizer step, by Megatron's formula (OptimizerParamScheduler)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hybrid5d.config.schema import RunConfig

DEFAULT_DECAY_STEPS = 100_000  # RLinf hard-wires Megatron's train_iters to it


@dataclass(frozen=True)
class LRSchedule:
    """`lr(k)` and `weight_decay(k)` of the k-th optimizer step, k from 0.

    Warm-up may be fractional. `decay_steps` is absolute, warm-up included. `samples_per_step` matters only to
    inverse-square-root without warm-up, where Megatron counts samples.
    """

    style: str = "constant"
    max_lr: float = 1e-3
    min_lr: float = 0.0
    warmup_steps: float = 0.0
    warmup_init: float = 0.0
    decay_steps: int = DEFAULT_DECAY_STEPS
    wsd_decay_steps: int | None = None
    wsd_decay_style: str = "exponential"
    start_weight_decay: float = 0.0
    end_weight_decay: float = 0.0
    weight_decay_style: str = "constant"
    weight_decay_steps: int = DEFAULT_DECAY_STEPS
    samples_per_step: int = 1

    def lr(self, k: int) -> float:
        """Learning rate of the optimizer step with index k."""
        if self.warmup_steps > 0 and k <= self.warmup_steps:
            return self.warmup_init + (self.max_lr - self.warmup_init) * k / self.warmup_steps
        if self.style == "constant":
            return self.max_lr
        if k > self.decay_steps:
            return self.min_lr
        if self.style == "inverse-square-root":
            warmup = max(self.warmup_steps * self.samples_per_step, 1)
            done = max(k * self.samples_per_step, 1)
            return max(self.min_lr, self.max_lr * math.sqrt(warmup) / math.sqrt(done))
        return self.min_lr + self._coefficient(k) * (self.max_lr - self.min_lr)

    def _coefficient(self, k: int) -> float:
        if self.style == "WSD":
            return self._tail(k)
        ratio = (k - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        if self.style == "linear":
            return 1.0 - ratio
        assert self.style == "cosine", self.style
        return 0.5 * (math.cos(math.pi * ratio) + 1.0)

    def _tail(self, k: int) -> float:
        assert self.wsd_decay_steps is not None  # plan.rules demands it for WSD
        start = self.decay_steps - self.wsd_decay_steps
        if k <= start:
            return 1.0
        ratio = (k - start) / self.wsd_decay_steps
        if self.wsd_decay_style == "linear":
            return 1.0 - ratio
        if self.wsd_decay_style == "cosine":
            return 0.5 * (math.cos(math.pi * ratio) + 1.0)
        if self.wsd_decay_style == "minus_sqrt":
            return 1.0 - math.sqrt(ratio)
        return 2.0 * 0.5**ratio - 1.0

    def weight_decay(self, k: int) -> float:
        """Weight decay of the optimizer step with index k."""
        start, end = self.start_weight_decay, self.end_weight_decay
        if k > self.weight_decay_steps or self.weight_decay_style == "constant":
            return end
        ratio = k / self.weight_decay_steps
        if self.weight_decay_style == "linear":
            return start + ratio * (end - start)
        return start + 0.5 * (math.cos(math.pi * (1.0 - ratio)) + 1.0) * (end - start)

    def to_dict(self) -> dict[str, Any]:
        """The part that `convert` and the run directory show."""
        return {
            "style": self.style,
            "warmup_steps": self.warmup_steps,
            "decay_steps": self.decay_steps,
            "min_lr": self.min_lr,
            "max_lr": self.max_lr,
            "warmup_init": self.warmup_init,
            "wsd_decay_steps": self.wsd_decay_steps,
            "wsd_decay_style": self.wsd_decay_style if self.style == "WSD" else None,
            "weight_decay": [self.start_weight_decay, self.end_weight_decay],
            "weight_decay_style": self.weight_decay_style,
        }


def warmup_steps(config: RunConfig) -> float:
    """Effective warm-up: the fraction of lr_decay_iters where given (it wins, 0.0 too), else the iterations."""
    sched = config.actor.lr_sched
    if sched.lr_warmup_fraction is None:
        return float(sched.lr_warmup_iters)
    return sched.lr_warmup_fraction * (sched.lr_decay_iters or DEFAULT_DECAY_STEPS)


def build_schedule(config: RunConfig, global_batch_size: int) -> LRSchedule:
    """The schedule a config asks for; `plan.rules` has checked it."""
    optim, sched = config.actor.optim, config.actor.lr_sched
    constant = sched.lr_decay_style == "constant"
    decay = [
        optim.weight_decay if v is None or constant else v for v in (sched.start_weight_decay, sched.end_weight_decay)
    ]
    return LRSchedule(
        style=sched.lr_decay_style,
        max_lr=optim.lr,
        min_lr=sched.min_lr,
        warmup_steps=warmup_steps(config),
        warmup_init=sched.lr_warmup_init,
        decay_steps=sched.lr_decay_iters or DEFAULT_DECAY_STEPS,
        wsd_decay_steps=sched.lr_wsd_decay_iters,
        wsd_decay_style=sched.lr_wsd_decay_style,
        start_weight_decay=decay[0],
        end_weight_decay=decay[1],
        weight_decay_style="constant" if constant else sched.weight_decay_incr_style,
        samples_per_step=global_batch_size,
    )
