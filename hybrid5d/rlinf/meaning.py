"""RLinf's meaning of a Megatron YAML, where it differs from ours: what is refused, renamed, or must be heard.

Source of the rules: RLinf's validators and Megatron-core's dataclass checks, cited by what they check, not by line.
"""

from __future__ import annotations

import math
from typing import Any

from hybrid5d.config.loaded import KeyReport
from hybrid5d.config.schema import RL_TASKS, ActorConfig, CriticConfig, RunConfig
from hybrid5d.config.tree import get, has, put
from hybrid5d.errors import ConfigError, Rule, reads, run_rules, touches
from hybrid5d.rlinf.keys import MOE_TYPES, TASKS, VLM_TYPES

NATIVE_DATA = ("text", "tokens", "chat")
SHAPE = ("actor.training_backend", "runner.task_type", "data.type")  # see `is_foreign`


def only_evaluates(tree: dict[str, Any]) -> ConfigError | None:
    """The refusal of a file that trains nothing though it has an actor, or None."""
    if get(tree, "runner.only_eval") is not True and tree.get("eval") is not True:
        return None
    shown = "eval: true" if tree.get("eval") is True else "runner.only_eval: true"
    rule = f"the file only evaluates ({shown}): nothing is trained"
    return ConfigError("runner.only_eval", True, rule, "give a training YAML, or set it to false")


def not_a_run(tree: dict[str, Any]) -> ConfigError | None:
    """The one reason why a file cannot be a training run of ours at all, or None."""
    actor = tree.get("actor")
    task = get(tree, "runner.task_type")
    if task is not None and task not in TASKS:
        rule = "unknown task"
        if "eval" in str(task):
            rule = "this task only evaluates: nothing is trained"
        elif any(word in str(task) for word in ("embodied", "offline", "real", "env", "dagger")):
            rule = "this task is not the training of a language model"
        return ConfigError("runner.task_type", task, rule, f"tasks that translate: {', '.join(TASKS)}")
    if actor is None and "actor" not in tree:
        kind = "an evaluation, tool or config-group file" if task is None else "a run without training"
        return ConfigError("actor", None, f"there is no actor block: {kind}, not a training run", "give a run's YAML")
    backend = get(tree, "actor.training_backend")
    if backend is not None and backend not in ("deepspeed", "megatron"):
        return ConfigError(
            "actor.training_backend",
            backend,
            "only Megatron layouts (or our own) can be translated",
            "use training_backend: megatron or deepspeed",
        )
    return None


def is_foreign(tree: dict[str, Any]) -> bool:
    """True for RLinf's shape on the Megatron backend: RL, or its multiple-choice VLM fine-tuning. Our own YAMLs with
    `training_backend: megatron` and data.type text, tokens or chat keep our rules."""
    if get(tree, "actor.training_backend") != "megatron":
        return False
    return get(tree, "runner.task_type", "sft") in RL_TASKS or get(tree, "data.type") not in NATIVE_DATA


def model_type(tree: dict[str, Any]) -> str:
    """The model family a YAML names, from the actor or the rollout block."""
    for path in ("actor.model.model_type", "rollout.model.model_type"):
        value = get(tree, path)
        if isinstance(value, str):
            return value
    return ""


def apply_aliases(owned: dict[str, Any], keys: KeyReport) -> None:
    """Fill keys that RLinf reads from another place."""
    rl = get(owned, "runner.task_type") in RL_TASKS and get(owned, "data.rollout_batch_size") is not None
    sources = (
        ("rollout.model.model_path", "actor.model.model_path", rl),
        ("rollout.model_dir", "actor.model.model_path", rl),  # RLinf's older name
        ("agentloop.is_dynamic_rollout_batch", "algorithm.multi_agent", rl),
        ("data.eval_data_paths", "data.val_data_paths", True),
        ("actor.model.vocab_size", "actor.model.padded_vocab_size", True),
    )
    for source, target, applies in sources:
        value = get(keys.tree, source)
        if not applies or value is None or source in keys.dangling or get(owned, target) is not None:
            continue
        blocks = target.split(".")[:-1]
        above = [get(owned, ".".join(blocks[:n])) for n in range(1, len(blocks) + 1)]
        if all(block is None or isinstance(block, dict) for block in above):
            put(owned, target, value)
            keys.dropped.pop(source, None)
            keys.aliases[source] = target


def rules(config: RunConfig, keys: KeyReport) -> list[ConfigError]:
    """Refusals that need the raw keys; those that need numbers of the layout are in `plan.rules`."""
    evaluates = only_evaluates(keys.tree)
    errors = [
        *([evaluates] if evaluates else []),
        *_moe(keys.tree),
        *_start_weights(keys),
        *run_rules([_precision_flags], (config, keys), keys.invalid),
    ]
    if keys.foreign and not touches(SHAPE, keys.invalid):
        errors += run_rules(FOREIGN_RULES, (config, keys), keys.invalid)
    return errors


def _moe(tree: dict[str, Any]) -> list[ConfigError]:
    key = "actor.model.expert_model_parallel_size"
    size = get(tree, key)
    family = model_type(tree).lower()
    fix = "use a dense model and expert_model_parallel_size: 1"
    if isinstance(size, (int, float)) and not isinstance(size, bool) and size > 1:
        return [ConfigError(key, size, "expert parallelism (mixture-of-experts models) is not supported", fix)]
    sign = ""
    if "moe" in family or family in MOE_TYPES:
        sign = f"model_type {family!r}"
    elif (get(tree, "actor.model.num_moe_experts") or 0) != 0:
        sign = "num_moe_experts"
    elif get(tree, "actor.model.moe_router_topk") is not None or get(tree, "actor.model.moe_grouped_gemm") is not None:
        sign = "moe_router_topk / moe_grouped_gemm"
    if sign:
        return [ConfigError(key, size, f"{sign} says mixture of experts, which is not supported", fix)]
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        return [ConfigError(key, size, "must be 1", "set it to 1 or remove it")]
    return []


def _start_weights(keys: KeyReport) -> list[ConfigError]:
    """Weights in Megatron's format: a translation may go on from the Hugging Face folder, a run may not."""
    tree = keys.tree
    key, flag = "actor.model.megatron_checkpoint", get(tree, "actor.megatron.use_hf_ckpt")
    value = get(tree, key)
    if value is None:
        if flag is False and keys.foreign and get(tree, "actor.checkpoint_load_path") is None:
            keys.notice(
                "use_hf_ckpt=False without megatron_checkpoint: RLinf has no start weights; ours are model_path's"
            )
        return []
    if flag is True:
        rule = "exactly one of megatron_checkpoint and actor.megatron.use_hf_ckpt=True may name the start weights"
        return [ConfigError(key, value, rule, "set megatron_checkpoint: null")]
    fix = "set it to null and name a Hugging Face folder in actor.model.model_path"
    error = ConfigError(key, value, "weights in Megatron's format cannot be read", fix)
    source = get(tree, "actor.model.model_path") or get(tree, "rollout.model.model_path")
    if not source:
        return [error]
    keys.run_faults.append(error)
    keys.notice(
        f"{key}={value!r} is dropped: weights in Megatron's format cannot be read. Training would start from the "
        f"Hugging Face folder {source!r}; make sure that these are the same weights"
    )
    return []


Subject = tuple[RunConfig, KeyReport]


def _trained(config: RunConfig) -> dict[str, ActorConfig | CriticConfig]:
    """The blocks of what is trained, by name."""
    return {"actor": config.actor, **({"critic": config.critic} if config.has_critic else {})}


@reads(*(f"{block}.{n}" for block in ("actor", "critic") for n in ("optim.fp16", "optim.bf16", "model.precision")),
       "critic.use_critic_model", "runner.task_type", "data.rollout_batch_size")  # fmt: skip
def _precision_flags(subject: Subject) -> list[ConfigError]:
    config, keys = subject
    return [error for block, own in _trained(config).items() for error in _flags_of(block, own, keys)]


def _flags_of(block: str, own: ActorConfig | CriticConfig, keys: KeyReport) -> list[ConfigError]:
    optim, key = own.optim, f"{block}.model.precision"
    if optim.fp16 and optim.bf16:
        rule = f"{block}.optim.fp16 and {block}.optim.bf16 are both true"
        return [ConfigError(f"{block}.optim.fp16", True, rule, "keep the one that model.precision names")]
    for name, value in (("fp16", optim.fp16), ("bf16", optim.bf16)):
        if value and own.model.precision != name:
            rule = f"{block}.optim.{name}=True contradicts {key}={get(keys.tree, key)!r}"
            return [ConfigError(f"{block}.optim.{name}", True, rule, f"remove it, or set {key}: {name}")]
    return []


@reads(*(f"actor.lr_sched.{n}" for n in ("lr_decay_style", "start_weight_decay", "end_weight_decay")),
       "actor.optim.weight_decay")  # fmt: skip
def _decay_keys(subject: Subject) -> list[ConfigError]:
    config, _ = subject
    sched, decay = config.actor.lr_sched, config.actor.optim.weight_decay
    style = sched.lr_decay_style
    ramp = {f"actor.lr_sched.{n}": getattr(sched, n) for n in ("start_weight_decay", "end_weight_decay")}
    if style == "constant":
        rule = (
            "with lr_decay_style constant, weight decay is optim.weight_decay, "
            "and start/end must be null (RLinf asserts it)"
        )
        fix = "set it to null or choose another style"
        return [ConfigError(k, v, rule, fix) for k, v in ramp.items() if v is not None]
    rule = f"lr_decay_style {style} needs start_weight_decay and end_weight_decay (optim.weight_decay is not read then)"
    return [
        ConfigError(k, None, rule, f"write {k.rpartition('.')[2]}: {decay:g}") for k, v in ramp.items() if v is None
    ]


@reads("actor.seed")
def _seed(subject: Subject) -> list[ConfigError]:
    seed = subject[0].actor.seed
    rule = "RLinf's Megatron actor needs a seed above 0"
    return [] if seed >= 1 else [ConfigError("actor.seed", seed, rule, "use 1 or more")]


@reads("runner.save_interval", "runner.val_check_interval")
def _intervals(subject: Subject) -> list[ConfigError]:
    save, check = subject[0].runner.save_interval, subject[0].runner.val_check_interval
    if check <= 0 or save < 0 or save % check == 0:
        return []
    rule, near = f"must be a multiple of runner.val_check_interval={check}", max(check, save - save % check)
    return [ConfigError("runner.save_interval", save, rule, f"use {near}, or val_check_interval: -1")]


@reads("data.max_prompt_length", "runner.seq_length", "data.rollout_batch_size")
def _prompt(subject: Subject) -> list[ConfigError]:
    config, _ = subject
    prompt, length = config.data.max_prompt_length, config.runner.seq_length
    if not config.is_rl or prompt is None or length is None or prompt < length:
        return []
    rule = f"must be below runner.seq_length={length}"
    return [ConfigError("data.max_prompt_length", prompt, rule, f"use {length // 2} or less")]


@reads()
def _raw_keys(subject: Subject) -> list[ConfigError]:
    tree = subject[1].tree
    errors = []
    kind = model_type(tree).lower()
    if get(tree, "runner.task_type") == "sft" and get(tree, "data.type") == "vlm" and kind and kind not in VLM_TYPES:
        rule = "data.type vlm needs a vision-language model"
        errors.append(ConfigError("actor.model.model_type", kind, rule, "use qwen2.5_vl"))
    return errors


FOREIGN_RULES: tuple[Rule[Subject], ...] = (
    _decay_keys, _seed, _intervals, _prompt, _raw_keys,
)  # fmt: skip


def notices(config: RunConfig, keys: KeyReport) -> None:
    """Everything a user of the YAML must hear, beyond what is dropped in silence."""
    tree = keys.tree
    if (
        any(part in model_type(tree).lower() for part in ("_vl", "vl_", "internvl", "llava"))
        or get(tree, "data.type") == "vlm"
    ):
        keys.notice(
            "vision-language model: the numbers are those of its language model; training it is not supported yet"
        )
    for block, own in _trained(config).items():
        _optimizer_notices(keys, block, own)
    _schedule_notices(keys, config)
    _batch_notices(keys, config)
    _loss_notices(keys, config)
    if keys.foreign and not config.is_rl and "data.prompt_key" in keys.owned:
        keys.dropped["data.prompt_key"] = (keys.owned.pop("data.prompt_key"), "field of RLinf's prompt data")
    temperature = config.algorithm.sampling_params.temperature
    if keys.foreign and temperature != 1.0:
        ours = "hybrid5d does not" if not config.is_rl else "hybrid5d in the head alone"
        theirs = "also outside RL" if not config.is_rl else "between pipeline stages too"
        keys.notice(f"logits divided by temperature {temperature:g} in training: RLinf does {theirs}, {ours}")
    if keys.foreign and config.is_rl:
        _rl_notices(keys, config)


def _rl_notices(keys: KeyReport, config: RunConfig) -> None:
    """Where an RL run differs from RLinf's on the same keys."""
    algorithm, tree = config.algorithm, keys.tree
    if config.has_critic:
        keys.notice(
            "second Megatron engine (critic) on the same GPUs: here a second DeepSpeed engine in the actor's processes"
        )
    if config.rollout.rollout_backend in ("sglang", "vllm"):
        keys.notice(
            f"rollout.rollout_backend={config.rollout.rollout_backend}: responses are generated by the training engine"
        )
    if isinstance(tree.get("agentloop"), dict):
        keys.notice("agentloop: agents and tools are not run here; a prompt is answered in one turn")
    if algorithm.normalize_advantages:
        keys.notice("normalize_advantages: RLinf does it twice, hybrid5d once, over the response tokens of the RL step")
    if algorithm.adv_type == "gae" and (algorithm.gamma < 1 or algorithm.gae_lambda < 1):
        keys.notice(
            "gae: RLinf puts the reward on the padded width's last column, so padding and tool output discount; "
            "hybrid5d on the last own token, and other tokens take no step"
        )
    if algorithm.early_stop_imp_ratio is not None:
        keys.notice(
            f"early_stop_imp_ratio={algorithm.early_stop_imp_ratio:g}: RLinf asks per micro-batch, hybrid5d once per "
            "optimizer step"
        )
    if algorithm.shuffle_rollout:
        keys.notice("shuffle_rollout: RLinf repeats one permutation, hybrid5d takes another in each RL step")


def _optimizer_notices(keys: KeyReport, block: str, own: ActorConfig | CriticConfig) -> None:
    optim, sched, model, written = own.optim, own.lr_sched, own.model, f"{block}.optim.min_lr"
    dead, of = get(keys.tree, written), "" if block == "actor" else f"{block}: "
    if dead is not None and dead != sched.min_lr:
        shown = f"{dead:g}" if isinstance(dead, (int, float)) else repr(dead)
        keys.notice(f"{of}optim.min_lr={shown} is dead, lr_sched.min_lr={sched.min_lr:g} wins")
    if written in keys.dropped:
        keys.overridden[written] = (dead, "lr_sched.min_lr wins (0.0 where absent)")
        del keys.dropped[written]
    for name in ("max_lr", "lr"):
        path = f"{block}.lr_sched.{name}"
        if path in keys.dropped:
            value, _ = keys.dropped.pop(path)
            keys.overridden[path] = (value, "optim.lr is the peak")
            if isinstance(value, (int, float)) and value != optim.lr:
                keys.notice(f"{of}lr_sched.{name}={value:g} is dead, optim.lr={optim.lr:g} is the peak")
    if model.precision == "bf16" and optim.loss_scale:
        keys.notice(
            f"{of}bf16 with loss_scale {optim.loss_scale:g}: Megatron applies a "
            "constant scaler, DeepSpeed's bf16 has none; dropped"
        )
    if model.precision == "fp16" and not optim.loss_scale:
        keys.notice(f"{of}fp16 without loss_scale: dynamic loss scale")
        power, least = math.log2(optim.initial_loss_scale), optim.min_loss_scale
        if power != round(power):
            shown = f"{of}initial_loss_scale={optim.initial_loss_scale:g}"
            keys.notice(f"{shown} becomes 2^{round(power)}: DeepSpeed takes powers of 2")
        if least != max(1, round(least)):
            keys.notice(
                f"{of}min_loss_scale={least:g} becomes {max(1, round(least))}: DeepSpeed takes integers from 1 on"
            )
    if model.precision == "fp32" and optim.loss_scale:
        keys.notice(f"{of}fp32 with loss_scale {optim.loss_scale:g}: fp32 needs no scaling; dropped")
    if (optim.bf16 is False and model.precision == "bf16") or (optim.fp16 is False and model.precision == "fp16"):
        flags = ", ".join(
            f"optim.{n}={v}" for n, v in (("bf16", optim.bf16), ("fp16", optim.fp16)) if v is not None
        )
        keys.notice(f"{of}{flags} contradicts precision {model.precision}: precision wins")
    if optim.optimizer_cpu_offload and optim.optimizer_offload_fraction == 0:
        keys.notice(f"{of}optimizer_cpu_offload with optimizer_offload_fraction 0 (RLinf's default) offloads nothing")
    if model.precision == "fp32" and keys.foreign:
        keys.notice(f"{of}precision fp32: RLinf's Megatron {block} refuses it, hybrid5d trains in it")


def _schedule_notices(keys: KeyReport, config: RunConfig) -> None:
    written = get(keys.raw, "actor.lr_sched.lr_decay_iters")
    if isinstance(written, str) and "max_epochs" in written:
        steps = config.actor.lr_sched.lr_decay_iters
        keys.notice(
            f"lr_decay_iters={written} is a number of epochs read as optimizer steps: decay ends after step {steps}"
        )
    if get(keys.tree, "data.type") == "vlm" and keys.foreign:
        keys.notice(
            "an epoch of RLinf's VLM fine-tuning covers 1/gradient_accumulation_steps of the data; here all of it"
        )


def _batch_notices(keys: KeyReport, config: RunConfig) -> None:
    tree, runner = keys.tree, config.runner
    if config.algorithm.multi_agent:
        keys.notice(
            "multi-agent actor: the real global batch is the number of sequences "
            "produced (padded to a multiple of dp x micro "
            "batch), the nominal one is shown"
        )
        if config.algorithm.n_minibatches > 1:
            keys.notice(
                "multi-agent padding goes to dp x micro batch only, so "
                "n_minibatches > 1 may hit RLinf's split assertion"
            )
    down = get(tree, "algorithm.down_sampling")
    if isinstance(down, dict) and down.get("do_down_sampling") is True:
        keep = get(down, "down_sampling_config.down_sample_to_n")
        keys.notice(
            f"down_sampling {config.algorithm.group_size}->{keep} per group: RLinf's real global batch is variable and "
            "smaller than the nominal one shown; hybrid5d trains on every sequence"
        )
    if runner.enable_dynamic_batch_size and runner.max_tokens_per_mbs:
        cp = config.actor.model.context_parallel_size
        budget = runner.max_tokens_per_mbs
        keys.notice(
            f"dynamic batch: the number of micro-batches depends on the data, budget {budget}*cp={budget * cp} tokens; "
            "gradient_accumulation_steps is the nominal, static number"
        )
    overwritten = (("actor.global_batch_size", "global_batch_size"), ("actor.micro_batch_size", "micro_batch_size"))
    for path, name in overwritten if config.is_rl else ():
        if has(tree, path) and path in keys.owned:
            keys.notice(f"actor.{name} is overwritten by RLinf's RL batch arithmetic")


def _loss_notices(keys: KeyReport, config: RunConfig) -> None:
    algorithm = config.algorithm
    if not config.is_rl:
        for name, off in (("use_valid_token_scale", False), ("loss_agg_func", "token-mean")):
            if (value := getattr(algorithm, name)) != off:
                keys.notice(f"{name}={value} is read in RL only; hybrid5d averages over tokens")
    if keys.foreign and config.actor.loss_normalization == "token":
        keys.notice(
            "loss: RLinf takes the mean over micro-batches of per-micro-batch means, hybrid5d the exact mean over the "
            "global batch; actor.loss_normalization: micro_batch reproduces RLinf's"
        )
