"""Cross-key rules. Each returns every violation it finds: key, value, rule with the numbers put in, a fix."""

from __future__ import annotations

import glob
import math
from pathlib import Path

from hybrid5d.config.errors import ConfigError
from hybrid5d.config.schema import MAX_RANKS, ModelConfig, RunConfig
from hybrid5d.plan.deepspeed_config import asked_zero_stage
from hybrid5d.plan.model import ModelNumbers
from hybrid5d.plan.schedule import DEFAULT_DECAY_STEPS, warmup_steps
from hybrid5d.plan.sequence_rules import check_heads, check_hierarchical, ulysses_degree

_M, _O, _L = "actor.model.", "actor.optim.", "actor.lr_sched."
BACKENDS = ("tensorboard", "wandb", "swanlab")


def divisors(n: int) -> list[int]:
    """All divisors, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def world_rules(config: RunConfig, world_size: int) -> list[ConfigError]:
    """The three degrees must divide the world."""
    m = config.actor.model
    tp, pp, cp = m.tensor_model_parallel_size, m.pipeline_model_parallel_size, m.context_parallel_size
    unit = tp * pp * cp
    if world_size < 1:
        return [ConfigError("world_size", world_size, "at least one process is needed", "start one or more")]
    if world_size > MAX_RANKS:
        rule = f"no cluster has so many: at most {MAX_RANKS}"
        return [ConfigError("world_size", world_size, rule, "check cluster.num_nodes")]
    if world_size % unit == 0:
        return []
    low, high = world_size // unit * unit, (world_size // unit + 1) * unit
    near = " or ".join(str(n) for n in (low, high) if n)
    rule = (
        f"not a multiple of tensor_model_parallel_size {tp} x "
        f"pipeline_model_parallel_size {pp} x context_parallel_size {cp} "
        f"= {unit}"
    )
    return [ConfigError("world_size", world_size, rule, f"start {near} processes, or lower a degree")]


def head_rules(model: ModelConfig, numbers: ModelNumbers, ranks_per_node: int | None = None) -> list[ConfigError]:
    """Query and key/value heads and MLP width against tp and, for Ulysses, heads against cp."""
    errors: list[ConfigError] = []
    tp, heads, kv = model.tensor_model_parallel_size, numbers.num_attention_heads, numbers.num_key_value_heads
    key = f"{_M}tensor_model_parallel_size"
    if heads is not None and heads % tp:
        rule = f"num_attention_heads={heads} is not a multiple of it"
        errors.append(ConfigError(key, tp, rule, f"use one of {_some(_tp_values(heads, kv))}"))
    elif kv is not None and kv % tp and tp % kv:
        rule = f"num_key_value_heads={kv} is neither a multiple nor a divisor of it"
        errors.append(ConfigError(key, tp, rule, f"use one of {_some(_tp_values(heads or kv, kv))}"))
    inner = numbers.intermediate_size
    if inner is not None and inner % tp:
        rule = f"the MLP width {inner} (intermediate_size, ffn_hidden_size) is not a multiple of it"
        errors.append(ConfigError(key, tp, rule, f"use one of {_some(_tp_values(math.gcd(inner, heads or inner), kv))}"))
    if not errors and heads is not None:
        cp, sizes = model.context_parallel_size, model.hierarchical_context_parallel_sizes
        degree = ulysses_degree(model.cp_comm_type, sizes, kv or heads, tp, cp, ranks_per_node)
        errors += check_heads(heads, kv or heads, tp, cp, model.cp_comm_type, degree)
    return errors


def _tp_values(heads: int, kv: int | None) -> list[int]:
    return [t for t in divisors(heads) if kv is None or kv % t == 0 or t % kv == 0]


def _some(values: list[int]) -> str:
    return ", ".join(str(v) for v in values)


def model_rules(model: ModelConfig) -> list[ConfigError]:
    """Rules between the parallel and recompute keys themselves."""
    errors: list[ConfigError] = []
    if model.sequence_parallel and model.tensor_model_parallel_size == 1:
        rule = (
            "sequence parallelism cuts activations over the tensor-parallel group, and tensor_model_parallel_size is 1"
        )
        errors.append(
            ConfigError(f"{_M}sequence_parallel", True, rule, "set it to false, or tensor_model_parallel_size >= 2")
        )
    sizes = model.hierarchical_context_parallel_sizes
    errors += check_hierarchical(sizes, model.context_parallel_size, model.cp_comm_type)
    return errors + _recompute_rules(model)


def _recompute_rules(model: ModelConfig) -> list[ConfigError]:
    errors = []
    method, count = model.recompute_method, model.recompute_num_layers
    if model.recompute_granularity == "full":
        if method is None:
            errors.append(
                ConfigError(
                    f"{_M}recompute_method", None, "recompute_granularity full needs it", "use uniform or block"
                )
            )
        if count is None:
            rule = "recompute_granularity full needs it"
            errors.append(
                ConfigError(f"{_M}recompute_num_layers", None, rule, "use 1 with uniform, or layers per stage")
            )
    elif model.recompute_granularity == "selective" and count is not None:
        rule = "recompute_granularity selective recomputes attention in every layer, so it must be null"
        errors.append(ConfigError(f"{_M}recompute_num_layers", count, rule, "set it to null"))
    return errors


def schedule_rules(config: RunConfig) -> list[ConfigError]:
    """Learning rate and weight decay."""
    errors: list[ConfigError] = []
    optim, sched = config.actor.optim, config.actor.lr_sched
    decay, warmup = sched.lr_decay_iters or DEFAULT_DECAY_STEPS, warmup_steps(config)
    if warmup >= decay:
        name = "lr_warmup_iters" if sched.lr_warmup_fraction is None else "lr_warmup_fraction"
        rule = f"warm-up of {warmup:g} steps must end before lr_decay_iters={decay} (which counts from step 0)"
        errors.append(
            ConfigError(f"{_L}{name}", getattr(sched, name), rule, f"use fewer than {decay} steps of warm-up")
        )
    if sched.min_lr > optim.lr:
        rule = f"must not exceed actor.optim.lr={optim.lr:g}"
        errors.append(ConfigError(f"{_L}min_lr", sched.min_lr, rule, f"use {optim.lr:g} or less"))
    if sched.lr_warmup_init > optim.lr:
        rule = f"must not exceed actor.optim.lr={optim.lr:g}"
        errors.append(ConfigError(f"{_L}lr_warmup_init", sched.lr_warmup_init, rule, f"use {optim.lr:g} or less"))
    if sched.lr_decay_style == "WSD" and sched.lr_wsd_decay_iters is None:
        errors.append(
            ConfigError(f"{_L}lr_wsd_decay_iters", None, "style WSD needs the length of its tail", "write it")
        )
    if sched.lr_decay_style == "WSD" and (sched.lr_wsd_decay_iters or 0) > decay:
        rule = f"the tail is longer than lr_decay_iters={decay}"
        errors.append(ConfigError(f"{_L}lr_wsd_decay_iters", sched.lr_wsd_decay_iters, rule, f"use {decay} or less"))
    return errors + _decay_rules(config)


def _decay_rules(config: RunConfig) -> list[ConfigError]:
    optim, sched = config.actor.optim, config.actor.lr_sched
    if sched.lr_decay_style == "constant":
        return []
    start = optim.weight_decay if sched.start_weight_decay is None else sched.start_weight_decay
    end = optim.weight_decay if sched.end_weight_decay is None else sched.end_weight_decay
    key = f"{_L}end_weight_decay"
    if end < start:
        return [ConfigError(key, end, f"must not be below start_weight_decay={start:g}", f"use {start:g} or more")]
    if sched.weight_decay_incr_style == "constant" and start != end:
        rule = f"weight_decay_incr_style constant needs start_weight_decay={start:g} to be equal"
        return [ConfigError(key, end, rule, f"use {start:g}, or weight_decay_incr_style: linear")]
    return []


def zero_rules(config: RunConfig) -> list[ConfigError]:
    """ZeRO 2 and 3 shard gradients, which accumulation over a pipeline cannot bear."""
    stage, pp = asked_zero_stage(config), config.actor.model.pipeline_model_parallel_size
    if stage >= 2 and pp > 1:
        rule = f"ZeRO {stage} does not work with pipeline_model_parallel_size={pp}"
        fix = "use stage: 1, or pipeline_model_parallel_size: 1"
        return [ConfigError("actor.deepspeed.zero_optimization.stage", stage, rule, fix)]
    return []


def dynamic_rules(config: RunConfig) -> list[ConfigError]:
    """Token budgets."""
    runner, cp = config.runner, config.actor.model.context_parallel_size
    if not runner.enable_dynamic_batch_size:
        return []
    key, budget = "runner.max_tokens_per_mbs", runner.max_tokens_per_mbs
    if budget is None:
        return [ConfigError(key, None, "enable_dynamic_batch_size needs a token budget", "write tokens per GPU")]
    length = config.row_length
    if length is not None and budget * cp < length:
        need = -(-length // cp)
        rule = f"{budget} x cp {cp} = {budget * cp} tokens do not hold one row of seq_length={length}"
        return [ConfigError(key, budget, rule, f"use {need} or more")]
    return []


def logger_rules(config: RunConfig) -> list[ConfigError]:
    """Trackers that exist."""
    unknown = [b for b in config.runner.logger.logger_backends if b not in BACKENDS]
    return [
        ConfigError("runner.logger.logger_backends", b, "unknown tracker", f"known: {', '.join(BACKENDS)}")
        for b in unknown
    ]


def training_rules(config: RunConfig) -> list[ConfigError]:
    """What a run needs on disk beyond the model's config.json."""
    errors: list[ConfigError] = []
    data, model = config.data, config.actor.model
    if data.type not in ("text", "tokens", "chat"):
        rule = "hybrid5d trains on text, tokens or chat; RLinf's own data types are translated only"
        errors.append(ConfigError("data.type", data.type, rule, "use chat for conversations, text for documents"))
    if not data.train_data_paths:
        errors.append(ConfigError("data.train_data_paths", None, "a run needs data", "name files, folders or globs"))
    errors += _paths("data.train_data_paths", data.train_data_paths) + _paths(
        "data.val_data_paths", data.val_data_paths
    )
    folder = Path(model.model_path) if model.model_path else None
    if model.load_weights and folder is not None and folder.is_dir() and not any(folder.glob("*.safetensors")):
        rule = f"{folder} has no safetensors"
        errors.append(
            ConfigError(f"{_M}load_weights", True, rule, "convert the weights to safetensors, or load_weights: false")
        )
    tokenizer = config.actor.tokenizer.tokenizer_model
    if tokenizer not in (None, "byte") and not Path(str(tokenizer)).exists():
        rule = "the folder does not exist"
        errors.append(
            ConfigError("actor.tokenizer.tokenizer_model", tokenizer, rule, "name a tokenizer folder, or byte")
        )
    resume = config.runner.resume_dir
    if resume not in (None, "auto") and not Path(str(resume)).is_dir():
        errors.append(
            ConfigError("runner.resume_dir", resume, "the folder does not exist", "name a checkpoint, auto, or null")
        )
    if config.actor.optim.optimizer_cpu_offload and config.actor.optim.optimizer_offload_fraction > 0:
        rule = "hybrid5d's trainer does not offload optimizer state yet (the translation to DeepSpeed does)"
        errors.append(ConfigError(f"{_O}optimizer_cpu_offload", True, rule, "set it to false"))
    return errors


def _paths(key: str, paths: tuple[str, ...] | None) -> list[ConfigError]:
    named = [p for p in paths or () if p.split("/")[0] != "stdlib"]  # `stdlib`: the running Python's own sources
    missing = [p for p in named if not (glob.has_magic(p) and glob.glob(p, recursive=True)) and not Path(p).exists()]
    return [ConfigError(key, p, "no such file or folder", "check the path") for p in missing]
