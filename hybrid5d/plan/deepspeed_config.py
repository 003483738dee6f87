"""The DeepSpeed configuration of a plan: the one place that speaks DeepSpeed's terms.

Context parallelism is folded into DeepSpeed's data axis, so `train_batch_size` is cp times the user's global batch.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from hybrid5d.config import tree as trees
from hybrid5d.config.schema import RunConfig
from hybrid5d.errors import ConfigError, touches
from hybrid5d.plan.batch import BatchPlan
from hybrid5d.plan.deepspeed_keys import AUTO_MEANS_DEFAULT, FORBIDDEN, SECTIONS, TOP_LEVEL, TRACKERS
from hybrid5d.plan.emitted import Emitted
from hybrid5d.plan.lr import LRSchedule

_BLOCK = "actor.deepspeed"
_A, _O, _S = "actor.", "actor.optim.", "actor.lr_sched."
_CP = "actor.model.context_parallel_size"
_PRECISION = "actor.model.precision"
NO_OVERLAP = "with ZeRO 0 and 1 gradients are reduced once a step, after the last backward pass"


@dataclass(frozen=True)
class PrecisionPlan:
    """Number format of weights and activations; gradients are always accumulated and reduced in fp32."""

    dtype: str  # fp32 | bf16 | fp16
    loss_scale: float | None = None  # fp16: constant scale; None there means dynamic
    initial_loss_scale: float = 2.0**16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    min_loss_scale: float = 1.0

    @property
    def dynamic_loss_scale(self) -> bool:
        """True where fp16 adapts its scale."""
        return self.dtype == "fp16" and self.loss_scale is None

    def adapts(self, loss_scale: float | None) -> bool:
        """Whether an overflow under this scale is mended by a smaller one; a constant scale skips the batch."""
        least = self.least_loss_scale if self.dynamic_loss_scale else 0
        return self.dtype == "fp16" and (loss_scale or 0.0) > least

    @property
    def least_loss_scale(self) -> int:
        """`min_loss_scale` as DeepSpeed takes it: an integer from 1 on."""
        return max(1, round(self.min_loss_scale))


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


def emit_deepspeed(
    config: RunConfig, batch: BatchPlan, schedule: LRSchedule, precision: PrecisionPlan, translation: bool
) -> Emitted:
    """Our part of the ds_config. `translation`: DeepSpeed feeds the trackers; in our runs our own metrics do."""
    e = Emitted()
    _emit_batch(e, config, batch)
    e.emit("gradient_clipping", config.actor.optim.clip_grad, f"{_O}clip_grad")
    _emit_optimizer(e, config, schedule)
    _emit_zero(e, config)
    e.emit("data_types.grad_accum_dtype", "fp32")
    e.emit("communication_data_type", "fp32")
    for name in ("pipe_partitioned", "grad_partitioned", "use_reentrant"):
        e.emit(f"pipeline.{name}", False)
    e.emit("steps_per_print", None, free=True)
    e.emit("wall_clock_breakdown", False)  # its timers do not fit instructions that are replaced: they fail
    e.emit("timers.throughput.enabled", False, free=True)  # ours counts; DeepSpeed's synchronises the device
    if config.actor.optim.optimizer == "sgd":  # DeepSpeed knows torch's SGD only by this permission
        e.emit("zero_allow_untested_optimizer", True, free=True)
    _emit_precision(e, precision)
    if translation:
        _emit_trackers(e, config)
    return e


def _emit_batch(e: Emitted, config: RunConfig, batch: BatchPlan) -> None:
    degrees = ("world_size", *(f"actor.model.{n}_parallel_size" for n in ("tensor_model", "pipeline_model", "context")))
    rows, micro = (f"{_A}global_batch_size",), f"{_A}micro_batch_size"
    over: tuple[str, ...] = ()
    if config.is_rl:
        over = (*rows, micro)
        rows = ("data.rollout_batch_size", "algorithm.group_size", "algorithm.n_minibatches")  # type: ignore[assignment]
        micro = "algorithm.training_batch_size_per_gpu"
    elif config.actor.global_batch_size is None:
        rows = (*rows, micro, *degrees)  # type: ignore[assignment]
    why = "RLinf's RL batch arithmetic overwrites it"
    e.emit("train_batch_size", batch.global_batch_size * config.actor.model.context_parallel_size, *rows, _CP,
           over=over, why=why)  # fmt: skip
    e.emit("train_micro_batch_size_per_gpu", batch.micro_batch_size, micro)
    e.emit("gradient_accumulation_steps", batch.gradient_accumulation_steps, *rows, micro, *degrees)


def _emit_optimizer(e: Emitted, config: RunConfig, schedule: LRSchedule) -> None:
    optim, sched = config.actor.optim, config.actor.lr_sched
    sgd, path = optim.optimizer == "sgd", "optimizer.params"
    e.emit("optimizer.type", "SGD" if sgd else "AdamW", f"{_O}optimizer")
    e.emit(f"{path}.lr", optim.lr, f"{_O}lr")
    if sgd:
        e.emit(f"{path}.momentum", optim.sgd_momentum, f"{_O}sgd_momentum")
    else:
        e.emit(f"{path}.betas", [optim.adam_beta1, optim.adam_beta2], f"{_O}adam_beta1", f"{_O}adam_beta2")
        e.emit(f"{path}.eps", optim.adam_eps, f"{_O}adam_eps")
    ramp = sched.lr_decay_style != "constant" and sched.start_weight_decay is not None
    over = [f"{_O}weight_decay"] if ramp and sched.end_weight_decay is not None else []
    e.emit(
        f"{path}.weight_decay", schedule.weight_decay(0),
        f"{_S}start_weight_decay" if ramp else f"{_O}weight_decay", over=over,
    )  # fmt: skip
    if not sgd:
        e.emit(f"{path}.torch_adam", True)
        e.emit(f"{path}.fused", True)  # one pass and no temporary of the partition's size
        e.emit(f"{path}.adam_w_mode", True)


def _emit_zero(e: Emitted, config: RunConfig) -> None:
    optim, zero = config.actor.optim, "zero_optimization"
    switch = f"{_O}use_distributed_optimizer"
    written = trees.has(config.actor.deepspeed, f"{zero}.stage")
    e.emit(f"{zero}.stage", max(1, asked_zero_stage(config)), _BLOCK if written else switch,
           over=[switch] if written else [], why=f"{_BLOCK}.{zero}.stage wins")  # fmt: skip
    overlap = f"{_O}overlap_grad_reduce"
    if asked_zero_stage(config) >= 2:
        e.emit(f"{zero}.overlap_comm", optim.overlap_grad_reduce, overlap, free=True)
    else:
        e.emit(f"{zero}.overlap_comm", False, over=[overlap], why=NO_OVERLAP)
    e.emit(f"{zero}.contiguous_gradients", False, free=True)
    if optim.optimizer_cpu_offload and optim.optimizer_offload_fraction > 0:
        key, ratio = f"{_O}optimizer_offload_fraction", offload_ratio(config)
        changed = ratio != optim.optimizer_offload_fraction
        e.emit(f"{zero}.offload_optimizer.device", "cpu", f"{_O}optimizer_cpu_offload", free=True)
        e.emit(f"{zero}.offload_optimizer.ratio", ratio, *([] if changed else [key]), over=[key] if changed else [],
               why="DeepSpeed offloads a part with ZeRO 3 only: all of it goes to the CPU", free=True)  # fmt: skip
    if config.actor.megatron.ddp_bucket_size is not None:
        size = config.actor.megatron.ddp_bucket_size
        e.emit(f"{zero}.reduce_bucket_size", size, "actor.megatron.ddp_bucket_size", free=True)


def _emit_precision(e: Emitted, precision: PrecisionPlan) -> None:
    if precision.dtype != "fp32":
        e.emit(f"{precision.dtype}.enabled", True, _PRECISION)
    if precision.dtype != "fp16":
        return
    e.emit("fp16.loss_scale", precision.loss_scale or 0, f"{_O}loss_scale")
    if precision.dynamic_loss_scale:
        power = round(math.log2(precision.initial_loss_scale))
        e.emit("fp16.initial_scale_power", power, f"{_O}initial_loss_scale")
        e.emit("fp16.loss_scale_window", precision.loss_scale_window, f"{_O}loss_scale_window")
        e.emit("fp16.hysteresis", precision.hysteresis, f"{_O}hysteresis")
        e.emit("fp16.min_loss_scale", precision.least_loss_scale, f"{_O}min_loss_scale")


def _emit_trackers(e: Emitted, config: RunConfig) -> None:
    runner, log = config.runner, config.runner.logger
    name = log.experiment_name or runner.experiment_name
    folder = log.log_path or f"{runner.output_dir}/{runner.experiment_name}"
    blocks = {
        "tensorboard": {"enabled": True, "output_path": f"{folder}/tensorboard", "job_name": name},
        "wandb": {"enabled": True, "project": log.project_name, "group": name},
    }
    for tracker, block in blocks.items():
        if tracker in log.logger_backends:
            for key, value in block.items():
                e.emit(f"{tracker}.{key}", value, "runner.logger", free=True)


def merge_block(
    e: Emitted, block: dict[str, Any], translation: bool, unknown: Collection[str] = ()
) -> list[ConfigError]:
    """Merge `actor.deepspeed` last; returns what it may not say.

    Args:
        unknown: keys whose value is not known; nothing that was made of them is compared.
    """
    errors: list[ConfigError] = []
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
            error = _merge_leaf(e, path, value, translation, unknown)
        if error is not None:
            errors.append(error)
    return errors


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


def _merge_leaf(e: Emitted, path: str, value: Any, translation: bool, unknown: Collection[str]) -> ConfigError | None:
    """Merge one leaf of the user's block, or say what is wrong with it."""
    key = f"{_BLOCK}.{path}"
    if path == "zero_optimization.stage":  # emitted already, with 0 raised to 1
        known = type(value) is int and value in (0, 1, 2, 3)
        return None if known else ConfigError(key, value, "the stages are 0, 1, 2 and 3", "use 1")
    ours = trees.get(e.tree, path, trees.MISSING)
    if value == {} and isinstance(ours, dict):
        return None
    fixed = path in e.sources and path not in e.free
    forbidden = next((k for k in FORBIDDEN if path == k or path.startswith(f"{k}.")), None)
    if not translation and path.split(".")[0] in TRACKERS:
        rule = "in a run hybrid5d's own metrics feed the trackers, not DeepSpeed"
        return ConfigError(key, value, rule, "set runner.logger.logger_backends instead")
    if not fixed and forbidden is None:
        if value != "auto":
            e.emit(path, value, _BLOCK, over=e.sources.get(path, ()), why=f"{key} wins", free=True)
        elif path not in AUTO_MEANS_DEFAULT and ours is trees.MISSING:
            return ConfigError(key, value, "'auto' has nothing to be taken from", "write a value, or remove the key")
        return None
    sources = [k for k in e.sources.get(path, ()) if k != "world_size"]
    instead = sources[0] if sources else FORBIDDEN.get(forbidden or "", "")
    if touches([*e.sources.get(path, ()), *([instead] if instead else [])], unknown):
        return None
    same = isinstance(value, bool) == isinstance(ours, bool) and value == ours
    if path == "optimizer.type":
        same = str(value).lower() == str(ours).lower()
    if same or (value == "auto" and ours is not trees.MISSING):
        return None
    rule = "hybrid5d writes this key itself" + (f", here {ours!r}" if ours is not trees.MISSING else "")
    rule += f": {e.reasons[path]}" if not sources and path in e.reasons else ""
    return ConfigError(key, value, rule, f"set {instead} instead" if instead else "remove it")
