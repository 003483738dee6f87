"""The plan of a run: everything that is known before a process group exists. Pure.

`find_faults` is the one list of rules. It takes a config with holes too (`config.errors`): a file with faults of its
own hears of the others in the same start.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from hybrid5d.config import tree as trees
from hybrid5d.config.schema import RunConfig
from hybrid5d.errors import ConfigError, ConfigErrors, SpoiltKey, judged
from hybrid5d.hf.spec import ModelSpec
from hybrid5d.plan import rules
from hybrid5d.plan.batch import BatchPlan, plan_batch
from hybrid5d.plan.deepspeed_config import (
    PrecisionPlan,
    asked_zero_stage,
    block_rules,
    build_deepspeed,
    offload_ratio,
    plan_precision,
)
from hybrid5d.plan.layout import ParallelLayout
from hybrid5d.plan.lr import LRSchedule, build_schedule
from hybrid5d.plan.model import ModelNumbers, ModelReading, read_model
from hybrid5d.plan.stages import split_layers
from hybrid5d.rlinf.placement import Placement, actor_placement


@dataclass(frozen=True)
class RecomputePlan:
    """Which layers compute their activations again in backward."""

    granularity: str | None = None  # full | selective | None
    method: str | None = None  # full: block (first num_layers of each stage) | uniform (groups of num_layers)
    num_layers: int | None = None


@dataclass(frozen=True)
class RunPlan:
    """What every rank agrees on."""

    config: RunConfig
    model: ModelSpec | None
    layout: ParallelLayout
    sequence_parallel: bool
    batch: BatchPlan
    stages: tuple[int, ...]  # decoder layers per pipeline stage; () where the model is unknown
    schedule: LRSchedule
    precision: PrecisionPlan
    zero_stage: int
    clip_grad: float
    recompute: RecomputePlan
    deepspeed: dict[str, Any]
    notices: tuple[str, ...] = ()
    report: tuple[dict[str, Any], ...] = field(default=(), compare=False)


@dataclass
class Assembly:
    """A plan as far as it can be made, with every violation. `convert` shows both."""

    plan: RunPlan
    numbers: ModelNumbers
    errors: list[ConfigError] = field(default_factory=list)


def build_plan(config: RunConfig, world_size: int, *, training: bool = True, evaluate: bool = False) -> RunPlan:
    """The plan of `config` on `world_size` processes.

    Args:
        training: also require what a run needs (model folder, data files); False for translation.
        evaluate: the run only evaluates, so training data may be missing.

    Raises:
        ConfigErrors: all violations, one line each.
    """
    from hybrid5d.plan.report import build_report  # the report describes plans, so it imports this module

    assembly = assemble(config, world_size, training=training, evaluate=evaluate)
    if assembly.errors:
        raise ConfigErrors(assembly.errors)
    return replace(assembly.plan, report=tuple(build_report(assembly.plan)))


def assemble(
    config: RunConfig,
    world_size: int,
    *,
    training: bool = False,
    evaluate: bool = False,
    gpus_per_node: int | None = None,
) -> Assembly:
    """Like `build_plan`, but returns what it can with the errors beside it."""
    model = config.actor.model
    tp, pp, cp = model.tensor_model_parallel_size, model.pipeline_model_parallel_size, model.context_parallel_size
    layout = ParallelLayout(pp=pp, dp=_replicas(config, world_size), cp=cp, tp=tp)
    batch, _ = plan_batch(config, layout.dp)
    reading = read_model(config, training)
    stages, _ = _stages(config, reading.numbers)
    precision = plan_precision(config)
    errors = find_faults(
        config, world_size, training=training, evaluate=evaluate, gpus_per_node=gpus_per_node, reading=reading
    )
    plan = RunPlan(
        config=config,
        model=reading.spec,
        layout=layout,
        sequence_parallel=model.sequence_parallel,
        batch=batch,
        stages=stages,
        schedule=build_schedule(config, batch.global_batch_size),
        precision=precision,
        zero_stage=max(1, asked_zero_stage(config)),
        clip_grad=config.actor.optim.clip_grad,
        recompute=_recompute(config),
        deepspeed=build_deepspeed(config, batch, precision, cp),
    )
    return Assembly(replace(plan, notices=_notices(plan, reading)), reading.numbers, errors)


def find_faults(
    config: RunConfig,
    world_size: int | None,
    *,
    training: bool,
    evaluate: bool = False,
    gpus_per_node: int | None = None,
    reading: ModelReading | None = None,
) -> list[ConfigError]:
    """Every violation. Rules that read a hole of `config`, or the world size where it is None, are left out.

    Args:
        reading: what `read_model` found in `config`, where it was called already.
    """
    if reading is None:
        reading = ModelReading()
        with suppress(SpoiltKey):
            reading = read_model(config, training)
    numbers = reading.numbers

    def world() -> int:
        if world_size is None:
            raise SpoiltKey("world_size")
        return world_size

    def batch() -> tuple[BatchPlan, list[ConfigError]]:
        return plan_batch(config, _replicas(config, world()))

    return judged(
        [
            lambda: rules.world_rules(config, world()),
            lambda: _placement_rules(config, world(), gpus_per_node, training),
            lambda: [] if rules.world_rules(config, world()) else batch()[1],
            lambda: reading.errors,
            lambda: rules.head_rules(config.actor.model, numbers),
            lambda: rules.ulysses_rules(config.actor.model, numbers, ranks_per_node(config, world())),
            lambda: rules.model_rules(config.actor.model),
            lambda: _stages(config, numbers)[1],
            lambda: rules.schedule_rules(config),
            lambda: rules.zero_rules(config),
            lambda: rules.dynamic_rules(config),
            lambda: rules.logger_rules(config),
            lambda: rules.training_rules(config, evaluate) + _translate_only(config) if training else [],
            lambda: block_rules(config, lambda: batch()[0]),
        ]
    )


def _replicas(config: RunConfig, world_size: int) -> int:
    model = config.actor.model
    unit = model.tensor_model_parallel_size * model.pipeline_model_parallel_size * model.context_parallel_size
    return max(world_size // unit, 1)


def ranks_per_node(config: RunConfig, world_size: int) -> int:
    """Processes of a node, from cluster.num_nodes; the whole world where they do not divide."""
    nodes = max(config.cluster.num_nodes, 1)
    return world_size // nodes if world_size % nodes == 0 else world_size


def _recompute(config: RunConfig) -> RecomputePlan:
    model = config.actor.model
    if model.recompute_granularity is None:
        return RecomputePlan()
    if model.recompute_granularity == "selective":
        return RecomputePlan("selective")
    return RecomputePlan("full", model.recompute_method, model.recompute_num_layers)


def _stages(config: RunConfig, numbers: ModelNumbers) -> tuple[tuple[int, ...], list[ConfigError]]:
    if numbers.num_layers is None:
        return (), []
    model = config.actor.model
    try:
        return split_layers(
            numbers.num_layers, model.pipeline_model_parallel_size, model.decoder_first_pipeline_num_layers,
            model.decoder_last_pipeline_num_layers,
        ), []  # fmt: skip
    except ConfigErrors as exc:
        return (), list(exc.errors)


def actor_world(config: RunConfig, gpus_per_node: int) -> tuple[Placement | None, list[ConfigError]]:
    """The actor's processes as `cluster` describes them."""
    cluster = config.cluster
    if cluster.num_nodes == 0:
        rule = "0 means all connected nodes, which only a running cluster knows"
        return None, [ConfigError("cluster.num_nodes", 0, rule, "write the number, or give --world-size")]
    return actor_placement(cluster.component_placement, cluster.num_nodes, gpus_per_node, cluster.node_groups)


def _placement_rules(
    config: RunConfig, world_size: int, gpus_per_node: int | None, training: bool
) -> list[ConfigError]:
    """At launch the started processes must be those that an explicit placement names."""
    if not training or config.cluster.num_nodes == 0:
        return []
    per_node = gpus_per_node or max(world_size, 1) * 1024  # the launcher knows the GPUs; here only the count matters
    placement, errors = actor_world(config, per_node)
    if errors or placement is None or placement.everything:
        return errors
    if placement.processes != world_size:
        key = next(k for k in config.cluster.component_placement if "actor" in [p.strip() for p in k.split(",")])
        value = config.cluster.component_placement[key]
        rule = f"gives the actor {placement.processes} processes, {world_size} were started"
        fix = f"start {placement.processes}, or set it to all"
        return [ConfigError(f"cluster.component_placement.{key}", value, rule, fix)]
    return []


def _translate_only(config: RunConfig) -> list[ConfigError]:
    account = config.account
    value = trees.get(account.tree, "actor.model.megatron_checkpoint") if account is not None else None
    if value is None:
        return []
    rule = "weights in Megatron's format cannot be read"
    fix = "set it to null and name a Hugging Face folder in actor.model.model_path"
    return [ConfigError("actor.model.megatron_checkpoint", value, rule, fix)]


def _notices(plan: RunPlan, reading: ModelReading) -> tuple[str, ...]:
    config, account = plan.config, plan.config.account
    told: list[str] = list(account.notices) if account is not None else []
    told += [n for n in reading.notices if n not in told]
    if asked_zero_stage(config) == 0:
        told.append(
            "ZeRO 0 is asked for; stage 1 runs, because DeepSpeed's norm and clipping are exact only from stage 1 on"
        )
    warmup = plan.schedule.warmup_steps
    if 0 < warmup < 1:
        told.append(
            f"warmup {warmup:g} iter: only optimizer step 1 runs at "
            f"lr_warmup_init={plan.schedule.warmup_init:g}, full lr from step 2"
        )
    if config.actor.model.recompute_granularity is None and config.actor.model.recompute_method is not None:
        told.append("recompute_method without recompute_granularity: nothing is recomputed")
    if plan.model is not None and (config.row_length or 0) > plan.model.max_position_embeddings:
        told.append(
            f"rows of up to {config.row_length} tokens exceed the model's max_position_embeddings="
            f"{plan.model.max_position_embeddings}: positions that it was not trained for"
        )
    if "swanlab" in config.runner.logger.logger_backends:
        told.append("tracker swanlab is not fed; metrics.jsonl always is")
    fraction = config.actor.optim.optimizer_offload_fraction
    if config.actor.optim.optimizer_cpu_offload and offload_ratio(config) != fraction:
        told.append(
            f"optimizer_offload_fraction={fraction:g} becomes 1: DeepSpeed keeps a part of the optimizer state on the "
            "CPU with ZeRO 3 only, else all of it"
        )
    told += _length_notice(config) + _loss_notice(config) + _more_than_megatron(plan, reading.numbers)
    return tuple(told)


def _length_notice(config: RunConfig) -> list[str]:
    """The model block's lengths where another one decides."""
    model, length = config.actor.model, config.row_length
    given = (("seq_length", model.seq_length), ("encoder_seq_length", model.encoder_seq_length))
    decides = "runner.seq_length" if config.runner.seq_length else "actor.model.seq_length"
    return [
        f"actor.model.{name}={value} is not read: {decides}={length} is the row length"
        for name, value in given
        if value is not None and value != length
    ]


def _loss_notice(config: RunConfig) -> list[str]:
    told = []
    if config.algorithm.use_valid_token_scale:
        told.append(
            "use_valid_token_scale=True: RLinf scales gradients by token counts of the RL step; hybrid5d does not"
        )
    if config.algorithm.loss_agg_func != "token-mean":
        told.append(f"loss_agg_func={config.algorithm.loss_agg_func} is RLinf's; hybrid5d averages over tokens")
    foreign = config.account is not None and config.account.foreign
    if not foreign or config.actor.loss_normalization == "micro_batch":
        return told
    same = "" if told else "; actor.loss_normalization: micro_batch reproduces RLinf's"
    return [
        *told,
        "loss: RLinf takes the mean over micro-batches of per-micro-batch "
        f"means, hybrid5d the exact mean over all valid tokens of the global batch{same}",
    ]


def _more_than_megatron(plan: RunPlan, numbers: ModelNumbers) -> list[str]:
    tp, pp = plan.layout.tp, plan.layout.pp
    foreign = plan.config.account is not None and plan.config.account.foreign
    if not foreign:
        return []
    told = []
    if numbers.num_layers is not None and numbers.num_layers % pp:
        told.append(
            f"{numbers.num_layers} layers over pp={pp}: Megatron refuses an "
            f"uneven split, hybrid5d uses {list(plan.stages)}"
        )
    if numbers.vocab_size is not None and numbers.vocab_size % tp:
        told.append(
            f"vocabulary {numbers.vocab_size} over tp={tp}: RLinf refuses it, hybrid5d pads it and hides the padding"
        )
    kv = numbers.num_key_value_heads
    if kv is not None and kv % tp and tp % kv == 0:
        told.append(f"{kv} kv heads over tp={tp}: RLinf's default Megatron refuses it, hybrid5d replicates kv heads")
    return told
