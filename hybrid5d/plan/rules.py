"""Cross-key rules. Each returns every violation it finds: key, value, rule with the numbers put in, a fix."""

from __future__ import annotations

import glob
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hybrid5d.config.schema import MAX_RANKS, ModelConfig, RunConfig
from hybrid5d.errors import ConfigError, judged
from hybrid5d.plan.deepspeed_config import asked_zero_stage
from hybrid5d.plan.lr import DEFAULT_DECAY_STEPS, warmup_steps
from hybrid5d.plan.model import ModelNumbers
from hybrid5d.plan.sequence_rules import check_heads, check_hierarchical, ulysses_degree
from hybrid5d.plan.tensors import legal_degrees, tp_faults

_M, _O, _L = "actor.model.", "actor.optim.", "actor.lr_sched."
BACKENDS = ("tensorboard", "wandb", "swanlab")


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


def head_rules(model: ModelConfig, numbers: ModelNumbers) -> list[ConfigError]:
    """Query and key/value heads and MLP width against tp."""
    tp, sizes = model.tensor_model_parallel_size, numbers.cut_by_tp
    if tp == 1 or not (faults := tp_faults(tp, *sizes)):
        return []
    fix = f"use one of {', '.join(map(str, legal_degrees(*sizes)))}"
    return [ConfigError(f"{_M}tensor_model_parallel_size", tp, rule, fix) for rule in faults]


def ulysses_rules(model: ModelConfig, numbers: ModelNumbers, ranks_per_node: int | None = None) -> list[ConfigError]:
    """Heads against cp, where tp can cut them."""
    tp, heads, kv = model.tensor_model_parallel_size, numbers.num_attention_heads, numbers.num_key_value_heads
    if heads is None or head_rules(model, numbers):
        return []
    cp, sizes = model.context_parallel_size, model.hierarchical_context_parallel_sizes
    degree = ulysses_degree(model.cp_comm_type, sizes, kv or heads, tp, cp, ranks_per_node)
    return check_heads(heads, kv or heads, tp, cp, model.cp_comm_type, degree)


def model_rules(model: ModelConfig) -> list[ConfigError]:
    """Rules between the parallel and recompute keys themselves."""
    return judged([_sequence_parallel, _hierarchical, _recompute_rules], model)


def _sequence_parallel(model: ModelConfig) -> list[ConfigError]:
    if not model.sequence_parallel or model.tensor_model_parallel_size > 1:
        return []
    rule = "sequence parallelism cuts activations over the tensor-parallel group, and tensor_model_parallel_size is 1"
    return [ConfigError(f"{_M}sequence_parallel", True, rule, "set it to false, or tensor_model_parallel_size >= 2")]


def _hierarchical(model: ModelConfig) -> list[ConfigError]:
    sizes = model.hierarchical_context_parallel_sizes
    return check_hierarchical(sizes, model.context_parallel_size, model.cp_comm_type)


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
    peak = [partial(_below_peak, name) for name in ("min_lr", "lr_warmup_init")]
    return judged([_warmup, *peak, _tail, _decay_rules], config)


def _warmup(config: RunConfig) -> list[ConfigError]:
    sched = config.actor.lr_sched
    decay, warmup = sched.lr_decay_iters or DEFAULT_DECAY_STEPS, warmup_steps(config)
    if warmup < decay:
        return []
    name = "lr_warmup_iters" if sched.lr_warmup_fraction is None else "lr_warmup_fraction"
    rule = f"warm-up of {warmup:g} steps must end before lr_decay_iters={decay} (which counts from step 0)"
    return [ConfigError(f"{_L}{name}", getattr(sched, name), rule, f"use fewer than {decay} steps of warm-up")]


def _below_peak(name: str, config: RunConfig) -> list[ConfigError]:
    value, peak = getattr(config.actor.lr_sched, name), config.actor.optim.lr
    if value <= peak:
        return []
    return [ConfigError(f"{_L}{name}", value, f"must not exceed actor.optim.lr={peak:g}", f"use {peak:g} or less")]


def _tail(config: RunConfig) -> list[ConfigError]:
    sched, key = config.actor.lr_sched, f"{_L}lr_wsd_decay_iters"
    if sched.lr_decay_style != "WSD":
        return []
    if sched.lr_wsd_decay_iters is None:
        return [ConfigError(key, None, "style WSD needs the length of its tail", "write it")]
    decay = sched.lr_decay_iters or DEFAULT_DECAY_STEPS
    if sched.lr_wsd_decay_iters <= decay:
        return []
    rule = f"the tail is longer than lr_decay_iters={decay}"
    return [ConfigError(key, sched.lr_wsd_decay_iters, rule, f"use {decay} or less")]


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


def training_rules(config: RunConfig, evaluate: bool = False) -> list[ConfigError]:
    """What a run needs on disk beyond the model's config.json; an evaluation reads no training data."""
    data: list[Callable[[RunConfig], list[ConfigError]]] = [_data_type, partial(_paths, "val_data_paths")]
    if not evaluate:
        data[1:1] = [_train_data, partial(_paths, "train_data_paths")]
    return judged([*data, _weights, _tokenizer, _resume, _offload], config)


def _data_type(config: RunConfig) -> list[ConfigError]:
    kind = config.data.type
    if kind in ("text", "tokens", "chat"):
        return []
    rule = "hybrid5d trains on text, tokens or chat; RLinf's own data types are translated only"
    return [ConfigError("data.type", kind, rule, "use chat for conversations, text for documents")]


def _train_data(config: RunConfig) -> list[ConfigError]:
    if config.data.train_data_paths:
        return []
    return [ConfigError("data.train_data_paths", None, "a run needs data", "name files, folders or globs")]


def _weights(config: RunConfig) -> list[ConfigError]:
    model = config.actor.model
    folder = Path(model.model_path) if model.model_path else None
    if not model.load_weights or folder is None or not folder.is_dir() or any(folder.glob("*.safetensors")):
        return []
    fix = "convert the weights to safetensors, or load_weights: false"
    return [ConfigError(f"{_M}load_weights", True, f"{folder} has no safetensors", fix)]


def _tokenizer(config: RunConfig) -> list[ConfigError]:
    tokenizer = config.actor.tokenizer.tokenizer_model
    if tokenizer in (None, "byte") or Path(str(tokenizer)).exists():
        return []
    fix = "name a tokenizer folder, or byte"
    return [ConfigError("actor.tokenizer.tokenizer_model", tokenizer, "the folder does not exist", fix)]


def _resume(config: RunConfig) -> list[ConfigError]:
    resume = config.runner.resume_dir
    if resume in (None, "auto") or Path(str(resume)).is_dir():
        return []
    return [ConfigError("runner.resume_dir", resume, "the folder does not exist", "name a checkpoint, auto, or null")]


def _offload(config: RunConfig) -> list[ConfigError]:
    optim = config.actor.optim
    if not optim.optimizer_cpu_offload or optim.optimizer_offload_fraction <= 0:
        return []
    rule = "hybrid5d's trainer does not offload optimizer state yet (the translation to DeepSpeed does)"
    return [ConfigError(f"{_O}optimizer_cpu_offload", True, rule, "set it to false")]


def _paths(name: str, config: RunConfig) -> list[ConfigError]:
    paths: tuple[str, ...] | None = getattr(config.data, name)
    named = [p for p in paths or () if p.split("/")[0] != "stdlib"]  # `stdlib`: the running Python's own sources
    missing = [p for p in named if not (glob.has_magic(p) and glob.glob(p, recursive=True)) and not Path(p).exists()]
    return [ConfigError(f"data.{name}", p, "no such file or folder", "check the path") for p in missing]
