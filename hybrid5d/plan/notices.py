"""What a user must hear about a plan that is no fault."""

from __future__ import annotations

from hybrid5d.config.schema import RunConfig
from hybrid5d.plan.deepspeed_config import NO_OVERLAP, asked_zero_stage, offload_ratio
from hybrid5d.plan.deepspeed_rules import gather_notices
from hybrid5d.plan.draft import Draft
from hybrid5d.plan.lr import DEFAULT_DECAY_STEPS, warmup_steps


def plan_notices(draft: Draft) -> tuple[str, ...]:
    """What loading found, then what the plan adds, each once."""
    config, spec = draft.config, draft.reading.spec
    notices = [*(config.keys.notices if config.keys is not None else []), *draft.reading.notices]
    if asked_zero_stage(config) == 0:
        notices.append(
            "ZeRO 0 is asked for; stage 1 runs, because DeepSpeed's norm and clipping are exact only from stage 1 on"
        )
    if config.actor.optim.overlap_grad_reduce and asked_zero_stage(config) < 2:
        notices.append(f"actor.optim.overlap_grad_reduce is not followed: {NO_OVERLAP}")
    if not draft.translation:
        notices += gather_notices(config.actor.deepspeed)
    notices += [*_schedule_notices(config), *_pipeline_notices(config)]
    if config.actor.model.recompute_granularity is None and config.actor.model.recompute_method is not None:
        notices.append("recompute_method without recompute_granularity: nothing is recomputed")
    if spec is not None and (config.row_length or 0) > spec.max_position_embeddings:
        notices.append(
            f"rows of up to {config.row_length} tokens exceed the model's max_position_embeddings="
            f"{spec.max_position_embeddings}: positions that it was not trained for"
        )
    if config.is_rl and config.data.type == "rollouts":
        notices.append(
            "rollouts come from files, in file order: data.shuffle, prompt and answer keys, reward.*, rollout.* and "
            "sampling_params but temperature are not read"
        )
    if "swanlab" in config.runner.logger.logger_backends:
        notices.append("tracker swanlab is not fed; metrics.jsonl always is")
    fraction = config.actor.optim.optimizer_offload_fraction
    if config.actor.optim.optimizer_cpu_offload and offload_ratio(config) != fraction:
        notices.append(
            f"optimizer_offload_fraction={fraction:g} becomes 1: DeepSpeed keeps a part of the optimizer state on the "
            "CPU with ZeRO 3 only, else all of it"
        )
    return tuple(dict.fromkeys([*notices, *_length_notices(config), *_more_than_megatron(draft)]))


def _schedule_notices(config: RunConfig) -> list[str]:
    sched, notices = config.actor.lr_sched, []
    warmup, end = (
        warmup_steps(config),
        config.runner.max_steps * (config.algorithm.n_minibatches if config.is_rl else 1),
    )
    if 0 < warmup < 1:
        notices.append(
            f"warmup {warmup:g} iter: only optimizer step 1 runs at lr_warmup_init={sched.lr_warmup_init:g}, full lr "
            "from step 2"
        )
    counting = [f"lr_decay_style {sched.lr_decay_style}"] if sched.lr_decay_style != "constant" else []
    counting += ["lr_warmup_fraction"] if sched.lr_warmup_fraction else []
    if sched.lr_decay_iters is None and counting and end < DEFAULT_DECAY_STEPS:
        length = f"the run ends after {end} (runner.max_steps)" if end > 0 else "whatever the length of the run"
        notices.append(
            f"lr_decay_iters is not given: {' and '.join(counting)} counts {DEFAULT_DECAY_STEPS} steps (RLinf's rule), "
            f"{length}; write lr_decay_iters to end with the run"
        )
    return notices


def _pipeline_notices(config: RunConfig) -> list[str]:
    """Keys of the pipeline where nothing of theirs runs."""
    model, stage = config.actor.model, asked_zero_stage(config)
    pp = model.pipeline_model_parallel_size
    if pp > 1 and stage < 2:
        return []
    why = f"ZeRO {stage} runs micro-batches one by one" if stage >= 2 else f"there is one stage ({pp} pipeline rank)"
    plain = {"pipeline_schedule": (None, "1f1b"), "pipeline_warmup": ("plain",), "pipeline_partition": ("uniform",)}
    given = [f"{name}={getattr(model, name)}" for name, usual in plain.items() if getattr(model, name) not in usual]
    return [f"actor.model.{word} has no effect: {why}" for word in given]


def _length_notices(config: RunConfig) -> list[str]:
    """The model block's lengths where another one decides."""
    model, length = config.actor.model, config.row_length
    given = (("seq_length", model.seq_length), ("encoder_seq_length", model.encoder_seq_length))
    decides = "runner.seq_length" if config.runner.seq_length else "actor.model.seq_length"
    return [
        f"actor.model.{name}={value} is not read: {decides}={length} is the row length"
        for name, value in given
        if value is not None and value != length
    ]


def _more_than_megatron(draft: Draft) -> list[str]:
    tp, pp, numbers = draft.layout.tp, draft.layout.pp, draft.reading.numbers
    keys = draft.config.keys
    if keys is None or not keys.foreign:
        return []
    notices = []
    if numbers.num_layers is not None and numbers.num_layers % pp:
        notices.append(
            f"{numbers.num_layers} layers over pp={pp}: Megatron refuses an "
            f"uneven split, hybrid5d uses {list(draft.stages)}"
        )
    if numbers.vocab_size is not None and numbers.vocab_size % tp:
        notices.append(
            f"vocabulary {numbers.vocab_size} over tp={tp}: RLinf refuses it, hybrid5d pads it and hides the padding"
        )
    kv = numbers.num_key_value_heads
    if kv is not None and kv % tp and tp % kv == 0:
        notices.append(f"{kv} kv heads over tp={tp}: RLinf's default Megatron refuses it, hybrid5d replicates kv heads")
    return notices
