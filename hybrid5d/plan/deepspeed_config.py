"""The DeepSpeed configuration of a plan: the one place that speaks DeepSpeed's terms.

Context parallelism is folded into DeepSpeed's data axis, so `train_batch_size` is cp times the user's global batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hybrid5d.config import tree as trees
from hybrid5d.config.schema import RunConfig
from hybrid5d.errors import ConfigError, SpoiltKey
from hybrid5d.plan.batch import BatchPlan
from hybrid5d.plan.deepspeed_keys import AUTO_MEANS_DEFAULT, OWNED, SECTIONS, TOP_LEVEL
from hybrid5d.plan.lr import build_schedule

_BLOCK = "actor.deepspeed"


@dataclass(frozen=True)
class PrecisionPlan:
    """Number format of weights and activations; gradients are always accumulated and reduced in fp32."""

    dtype: str  # fp32 | bf16 | fp16
    loss_scale: float | None = None  # fp16: constant scale; None there means dynamic
    initial_loss_scale: float = 2.0**32
    loss_scale_window: int = 1000
    hysteresis: int = 2
    min_loss_scale: float = 1.0

    @property
    def dynamic_loss_scale(self) -> bool:
        """True where fp16 adapts its scale."""
        return self.dtype == "fp16" and self.loss_scale is None


def plan_precision(config: RunConfig) -> PrecisionPlan:
    """Precision of a config; the loss scale means something in fp16 only."""
    optim, dtype = config.actor.optim, config.actor.model.precision
    if dtype != "fp16":
        return PrecisionPlan(dtype)
    return PrecisionPlan(
        dtype, optim.loss_scale or None, optim.initial_loss_scale, optim.loss_scale_window, optim.hysteresis,
        optim.min_loss_scale,
    )  # fmt: skip


def asked_zero_stage(config: RunConfig) -> int:
    """Stage that the YAML asks for: actor.deepspeed's where written, else 1 or 0 by use_distributed_optimizer."""
    raw = trees.get(config.actor.deepspeed, "zero_optimization.stage")
    if isinstance(raw, int) and not isinstance(raw, bool) and 0 <= raw <= 3:
        return raw
    return 1 if config.actor.optim.use_distributed_optimizer else 0


def offload_ratio(config: RunConfig) -> float:
    """Part of the optimizer state that DeepSpeed keeps on the CPU: it takes a part with ZeRO 3 only, else all of it."""
    fraction = config.actor.optim.optimizer_offload_fraction
    return fraction if asked_zero_stage(config) == 3 else float(math.ceil(fraction))


def optimizer_block(config: RunConfig) -> dict[str, Any]:
    """`optimizer` of the ds_config."""
    optim = config.actor.optim
    decay = build_schedule(config, 1).weight_decay(0)
    if optim.optimizer == "sgd":
        return {"type": "SGD", "params": {"lr": optim.lr, "momentum": optim.sgd_momentum, "weight_decay": decay}}
    betas = [optim.adam_beta1, optim.adam_beta2]
    params = {"lr": optim.lr, "betas": betas, "eps": optim.adam_eps, "weight_decay": decay}
    return {"type": "AdamW", "params": {**params, "torch_adam": True, "adam_w_mode": True}}


def _own(config: RunConfig, batch: BatchPlan, precision: PrecisionPlan, cp: int) -> dict[str, Any]:
    ds: dict[str, Any] = {
        "train_batch_size": batch.global_batch_size * cp,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        "gradient_clipping": config.actor.optim.clip_grad,
        "optimizer": optimizer_block(config),
        "zero_optimization": _zero(config),
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False, "use_reentrant": False},
        "steps_per_print": None,
    }
    if config.actor.optim.optimizer == "sgd":
        ds["zero_allow_untested_optimizer"] = True  # DeepSpeed knows torch's SGD only by this permission
    if precision.dtype == "bf16":
        ds["bf16"] = {"enabled": True}
    elif precision.dtype == "fp16":
        ds["fp16"] = _fp16(precision)
    ds.update(_monitors(config))
    return ds


def _zero(config: RunConfig) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": max(1, asked_zero_stage(config)),
        "overlap_comm": config.actor.optim.overlap_grad_reduce,
        "contiguous_gradients": False,
    }
    optim = config.actor.optim
    if optim.optimizer_cpu_offload and optim.optimizer_offload_fraction > 0:
        zero["offload_optimizer"] = {"device": "cpu", "ratio": offload_ratio(config)}
    if config.actor.megatron.ddp_bucket_size is not None:
        zero["reduce_bucket_size"] = config.actor.megatron.ddp_bucket_size
    return zero


def _fp16(precision: PrecisionPlan) -> dict[str, Any]:
    if precision.loss_scale is not None:
        return {"enabled": True, "loss_scale": precision.loss_scale}
    return {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": round(math.log2(precision.initial_loss_scale)),
        "loss_scale_window": precision.loss_scale_window,
        "hysteresis": precision.hysteresis,
        "min_loss_scale": max(1, round(precision.min_loss_scale)),
    }


def _monitors(config: RunConfig) -> dict[str, Any]:
    runner, log = config.runner, config.runner.logger
    name = log.experiment_name or runner.experiment_name
    folder = log.log_path or f"{runner.output_dir}/{runner.experiment_name}"
    blocks: dict[str, Any] = {}
    if "tensorboard" in log.logger_backends:
        blocks["tensorboard"] = {"enabled": True, "output_path": f"{folder}/tensorboard", "job_name": name}
    if "wandb" in log.logger_backends:
        blocks["wandb"] = {"enabled": True, "project": log.project_name, "group": name}
    return blocks


def build_deepspeed(config: RunConfig, batch: BatchPlan, precision: PrecisionPlan, cp: int) -> dict[str, Any]:
    """The ds_config with `actor.deepspeed` merged last, without what that block may not say."""
    own = _own(config, batch, precision, cp)
    return trees.merge(own, _user_block(config.actor.deepspeed, own)[0])


def block_rules(config: RunConfig, batch: Callable[[], BatchPlan]) -> list[ConfigError]:
    """What `actor.deepspeed` may not say. Keys that we write ourselves are judged only where all of ours are known."""
    own = None
    with suppress(SpoiltKey):
        own = _own(config, batch(), plan_precision(config), config.actor.model.context_parallel_size)
    return _user_block(config.actor.deepspeed, own)[1]


def _user_block(block: dict[str, Any], own: dict[str, Any] | None) -> tuple[dict[str, Any], list[ConfigError]]:
    errors: list[ConfigError] = []
    result: dict[str, Any] = {}
    for name in block:
        if name not in TOP_LEVEL:
            near = trees.nearest(name, TOP_LEVEL)
            fix = (
                f"did you mean {near}?" if near else "DeepSpeed 0.19.8 has no such key (it would be ignored in silence)"
            )
            errors.append(ConfigError(f"{_BLOCK}.{name}", block[name], "unknown DeepSpeed key", fix))
    for path, value in trees.leaves({k: v for k, v in block.items() if k in TOP_LEVEL}):
        error = _section_fault(path, value)
        if error is None:
            keep, error = _leaf(path, value, own)
            if keep:
                trees.put(result, path, value)
        if error is not None:
            errors.append(error)
    return result, errors


def _section_fault(path: str, value: Any) -> ConfigError | None:
    section, _, name = path.partition(".")
    known = SECTIONS.get(section)
    if known is None:
        return None
    if not name:
        if isinstance(value, dict):
            return None
        return ConfigError(f"{_BLOCK}.{section}", value, "must be a mapping", f"write {section}: {{...}}")
    first = name.partition(".")[0]
    if first in known:
        return None
    near = trees.nearest(first, known)
    fix = f"did you mean {section}.{near}?" if near else f"known: {', '.join(sorted(known))}"
    return ConfigError(f"{_BLOCK}.{path}", value, "unknown DeepSpeed key", fix)


def _leaf(path: str, value: Any, own: dict[str, Any] | None) -> tuple[bool, ConfigError | None]:
    """(is it merged?, what is wrong with it)."""
    key = f"{_BLOCK}.{path}"
    owned = next((k for k in OWNED if path == k or path.startswith(f"{k}.")), None)
    if owned is None:
        if value == "auto":
            if path in AUTO_MEANS_DEFAULT:
                return False, None
            return False, ConfigError(
                key, value, "'auto' has nothing to be taken from", "write a value, or remove the key"
            )
        if path != "zero_optimization.stage":
            return True, None
        if type(value) is not int or value not in (0, 1, 2, 3):
            return False, ConfigError(key, value, "the stages are 0, 1, 2 and 3", "use 1")
        return False, None  # `own` has it already, with 0 raised to 1
    if own is None:
        return False, None
    ours = trees.get(own, path, trees.MISSING)
    if value == "auto" and ours is not trees.MISSING:
        return False, None  # resolved: ours stays
    if path in ("optimizer.type",) and str(value).lower() == str(ours).lower():
        return False, None
    same_kind = isinstance(value, bool) == isinstance(ours, bool)
    if same_kind and value == ours:
        return False, None
    instead = OWNED[owned]
    rule = "hybrid5d writes this key itself" + (f", here {ours!r}" if ours is not trees.MISSING else "")
    fix = f"set {instead} instead" if instead else "remove it"
    return False, ConfigError(key, value, rule, fix)
