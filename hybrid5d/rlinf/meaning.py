"""RLinf's meaning of a Megatron YAML, where it differs from ours: what is refused, renamed, or must be heard.

Source of the rules: RLinf's validators and Megatron-core's dataclass checks, cited by what they check, not by line.
"""

from __future__ import annotations

import math
from typing import Any

from hybrid5d.config.schema import RunConfig
from hybrid5d.config.tree import get, has
from hybrid5d.errors import ConfigError, judged
from hybrid5d.rlinf.account import Account
from hybrid5d.rlinf.keys import MOE_TYPES, RL_TASKS, TASKS, VLM_TYPES

GROUPED = ("grpo", "grpo_dynamic", "reinpp_baseline")  # advantages relative to the group
NATIVE_DATA = ("text", "tokens", "chat")
SHAPE = {"actor", "actor.training_backend", "runner", "runner.task_type", "data", "data.type"}  # see `is_foreign`


def only_evaluates(tree: dict[str, Any]) -> ConfigError | None:
    """The refusal of a file that trains nothing though it has an actor, or None."""
    if get(tree, "runner.only_eval") is not True and tree.get("eval") is not True:
        return None
    shown = "eval: true" if tree.get("eval") is True else "runner.only_eval: true"
    rule = f"the file only evaluates ({shown}): nothing is trained"
    return ConfigError("runner.only_eval", True, rule, "give a training YAML, or set it to false")


def not_a_run(tree: dict[str, Any]) -> ConfigError | None:
    """The one reason why a file cannot be a training run of ours at all, or None."""
    if not tree:
        return ConfigError("", None, "the file is empty", "give a run's YAML")
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


def is_rl(tree: dict[str, Any]) -> bool:
    """True where batch sizes follow RLinf's RL arithmetic."""
    return get(tree, "runner.task_type") in RL_TASKS


def model_type(tree: dict[str, Any]) -> str:
    """The model family a YAML names, from the actor or the rollout block."""
    for path in ("actor.model.model_type", "rollout.model.model_type"):
        value = get(tree, path)
        if isinstance(value, str):
            return value
    return ""


def apply_aliases(owned: dict[str, Any], account: Account) -> None:
    """Fill keys that RLinf reads from another place."""
    tree = account.tree
    wanted = (
        ("rollout.model.model_path", "actor.model.model_path", is_rl(tree)),
        ("rollout.model_dir", "actor.model.model_path", is_rl(tree)),  # RLinf's older name
        ("agentloop.is_dynamic_rollout_batch", "algorithm.multi_agent", is_rl(tree)),
        ("data.eval_data_paths", "data.val_data_paths", True),
        ("actor.model.vocab_size", "actor.model.padded_vocab_size", True),
    )
    for source, target, applies in wanted:
        value = get(tree, source)
        if not applies or value is None or source in account.dangling or get(owned, target) is not None:
            continue
        block, _, name = target.rpartition(".")
        holder = owned
        for part in block.split("."):
            inner = holder.setdefault(part, {})
            if not isinstance(inner, dict):
                return
            holder = inner
        holder[name] = value
        account.dropped.pop(source, None)
        account.aliases[source] = target


def rules(account: Account, config: RunConfig | None) -> list[ConfigError]:
    """Refusals that need the raw keys; those that need numbers of the layout are in `plan.rules`.

    `config` may have holes; None where nothing of it is known.
    """
    tree = account.tree
    evaluates = only_evaluates(tree)
    errors = [
        *([evaluates] if evaluates else []),
        *_moe(tree),
        *_start_weights(account),
        *judged([_precision_flags], tree, config),
    ]
    if account.foreign and config is not None and not account.spoilt & SHAPE:
        errors += judged([_decay_keys, _foreign_rules], tree, config)
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


def _start_weights(account: Account) -> list[ConfigError]:
    tree = account.tree
    key, flag = "actor.model.megatron_checkpoint", get(tree, "actor.megatron.use_hf_ckpt")
    value = get(tree, key)
    if value is None:
        if flag is False and account.foreign and get(tree, "actor.checkpoint_load_path") is None:
            account.tell(
                "use_hf_ckpt=False without megatron_checkpoint: RLinf has no start weights; ours are model_path's"
            )
        return []
    if flag is True:
        rule = "exactly one of megatron_checkpoint and actor.megatron.use_hf_ckpt=True may name the start weights"
        return [ConfigError(key, value, rule, "set megatron_checkpoint: null")]
    source = get(tree, "actor.model.model_path") or (get(tree, "rollout.model.model_path") if is_rl(tree) else None)
    if not source:
        rule = "weights in Megatron's format cannot be read"
        return [
            ConfigError(key, value, rule, "name a Hugging Face folder in actor.model.model_path and set this to null")
        ]
    account.tell(
        f"{key}={value!r} is dropped: weights in Megatron's format cannot "
        "be read. Training would start from the Hugging Face "
        f"folder {source!r}; make sure that these are the same weights"
    )
    return []


def _precision_flags(tree: dict[str, Any], config: RunConfig | None) -> list[ConfigError]:
    fp16, bf16 = get(tree, "actor.optim.fp16"), get(tree, "actor.optim.bf16")
    if fp16 is True and bf16 is True:
        rule = "actor.optim.fp16 and actor.optim.bf16 are both true"
        return [ConfigError("actor.optim.fp16", True, rule, "keep the one that model.precision names")]
    if config is None:
        return []
    precision = config.actor.model.precision
    for name, value in (("fp16", fp16), ("bf16", bf16)):
        if value is True and precision != name:
            rule = f"actor.optim.{name}=True contradicts actor.model.precision={get(tree, 'actor.model.precision')!r}"
            return [ConfigError(f"actor.optim.{name}", True, rule, f"remove it, or set actor.model.precision: {name}")]
    return []


def _decay_keys(tree: dict[str, Any], config: RunConfig) -> list[ConfigError]:
    style = config.actor.lr_sched.lr_decay_style
    given = {n: get(tree, f"actor.lr_sched.{n}") for n in ("start_weight_decay", "end_weight_decay")}
    named = [f"actor.lr_sched.{n}" for n, v in given.items() if v is not None]
    if style == "constant" and named:
        rule = (
            "with lr_decay_style constant, weight decay is optim.weight_decay, "
            "and start/end must be null (RLinf asserts it)"
        )
        return [ConfigError(k, get(tree, k), rule, "set it to null or choose another style") for k in named]
    if style != "constant" and len(named) < 2:
        missing = [f"actor.lr_sched.{n}" for n, v in given.items() if v is None]
        decay = config.actor.optim.weight_decay
        rule = (
            f"lr_decay_style {style} needs start_weight_decay and "
            "end_weight_decay (optim.weight_decay is not read then)"
        )
        return [ConfigError(k, None, rule, f"write {k.rpartition('.')[2]}: {decay:g}") for k in missing]
    return []


def _foreign_rules(tree: dict[str, Any], config: RunConfig) -> list[ConfigError]:
    errors: list[ConfigError] = []
    runner, actor = config.runner, config.actor
    if actor.seed < 1:
        errors.append(
            ConfigError("actor.seed", actor.seed, "RLinf's Megatron actor needs a seed above 0", "use 1 or more")
        )
    save, check = runner.save_interval, runner.val_check_interval
    if check > 0 and save >= 0 and save % check:
        near = max(check, save - save % check)
        rule = f"must be a multiple of runner.val_check_interval={check}"
        errors.append(ConfigError("runner.save_interval", save, rule, f"use {near}, or val_check_interval: -1"))
    temperature = config.algorithm.sampling_params.temperature
    if temperature != 1.0 and actor.model.pipeline_model_parallel_size > 1:
        rule = "RLinf divides hidden states between pipeline stages by it, so with pp > 1 it changes the network"
        errors.append(ConfigError("algorithm.sampling_params.temperature", temperature, rule, "use 1.0, or pp 1"))
    adv, group = get(tree, "algorithm.adv_type"), config.algorithm.group_size
    if is_rl(tree) and adv in GROUPED and group < 2:
        rule = f"adv_type {adv} compares the sequences of a prompt with one another, so a prompt needs at least 2"
        errors.append(ConfigError("algorithm.group_size", group, rule, "use 2 or more"))
    prompt = config.data.max_prompt_length
    if is_rl(tree) and prompt is not None and runner.seq_length is not None and prompt >= runner.seq_length:
        rule = f"must be below runner.seq_length={runner.seq_length}"
        errors.append(ConfigError("data.max_prompt_length", prompt, rule, f"use {runner.seq_length // 2} or less"))
    if (get(tree, "algorithm.critic_warmup_steps") or 0) != 0 and get(tree, "critic.use_critic_model") is True:
        value = get(tree, "algorithm.critic_warmup_steps")
        errors.append(
            ConfigError("algorithm.critic_warmup_steps", value, "not implemented in RLinf either", "set it to 0")
        )
    kind = model_type(tree).lower()
    if get(tree, "runner.task_type") == "sft" and get(tree, "data.type") == "vlm" and kind and kind not in VLM_TYPES:
        errors.append(
            ConfigError("actor.model.model_type", kind, "data.type vlm needs a vision-language model", "use qwen2.5_vl")
        )
    return errors


def notices(account: Account, config: RunConfig) -> None:
    """Everything a user of the YAML must hear, beyond what is dropped in silence."""
    tree = account.tree
    if (
        any(part in model_type(tree).lower() for part in ("_vl", "vl_", "internvl", "llava"))
        or get(tree, "data.type") == "vlm"
    ):
        account.tell(
            "vision-language model: the numbers are those of its language model; training it is not supported yet"
        )
    _optimizer_notices(account, config)
    _schedule_notices(account, config)
    _batch_notices(account, config)
    temperature = config.algorithm.sampling_params.temperature
    if account.foreign and temperature != 1.0:
        account.tell(
            f"logits divided by temperature {temperature:g} in training: RLinf does, hybrid5d's trainer does not"
        )
    if get(tree, "critic.use_critic_model") is True:
        account.tell(
            "second Megatron engine (critic) on the same GPUs: only the actor "
            "is translated; translate it as a run of its own"
        )


def _optimizer_notices(account: Account, config: RunConfig) -> None:
    tree, optim, sched, model = account.tree, config.actor.optim, config.actor.lr_sched, config.actor.model
    dead = get(tree, "actor.optim.min_lr")
    if dead is not None and dead != sched.min_lr:
        shown = f"{dead:g}" if isinstance(dead, (int, float)) else repr(dead)
        account.tell(f"optim.min_lr={shown} is dead, lr_sched.min_lr={sched.min_lr:g} wins")
    if "actor.optim.min_lr" in account.dropped:
        account.overridden["actor.optim.min_lr"] = (dead, "lr_sched.min_lr wins (0.0 where absent)")
        del account.dropped["actor.optim.min_lr"]
    for name in ("max_lr", "lr"):
        path = f"actor.lr_sched.{name}"
        if path in account.dropped:
            value, _ = account.dropped.pop(path)
            account.overridden[path] = (value, "optim.lr is the peak")
            if isinstance(value, (int, float)) and value != optim.lr:
                account.tell(f"lr_sched.{name}={value:g} is dead, optim.lr={optim.lr:g} is the peak")
    if model.precision == "bf16" and optim.loss_scale:
        account.tell(
            f"bf16 with loss_scale {optim.loss_scale:g}: Megatron applies a "
            "constant scaler, DeepSpeed's bf16 has none; dropped"
        )
    if model.precision == "fp16" and not optim.loss_scale:
        account.tell("fp16 without loss_scale: dynamic loss scale")
    if model.precision == "fp16" and not optim.loss_scale:
        power, least = math.log2(optim.initial_loss_scale), optim.min_loss_scale
        if power != round(power):
            account.tell(
                f"initial_loss_scale={optim.initial_loss_scale:g} becomes 2^{round(power)}: DeepSpeed takes powers of 2"
            )
        if least != max(1, round(least)):
            account.tell(f"min_loss_scale={least:g} becomes {max(1, round(least))}: DeepSpeed takes integers from 1 on")
    if model.precision == "fp32" and optim.loss_scale:
        account.tell(f"fp32 with loss_scale {optim.loss_scale:g}: fp32 needs no scaling; dropped")
    if (optim.bf16 is False and model.precision == "bf16") or (optim.fp16 is False and model.precision == "fp16"):
        flags = ", ".join(f"optim.{n}={v}" for n, v in (("bf16", optim.bf16), ("fp16", optim.fp16)) if v is not None)
        account.tell(f"{flags} contradicts precision {model.precision}: precision wins")
    if optim.optimizer_cpu_offload and optim.optimizer_offload_fraction == 0:
        account.tell("optimizer_cpu_offload with optimizer_offload_fraction 0 (RLinf's default) offloads nothing")
    if model.precision == "fp32" and account.foreign:
        account.tell("precision fp32: RLinf's Megatron actor refuses it, hybrid5d trains in it")


def _schedule_notices(account: Account, config: RunConfig) -> None:
    written = get(account.raw, "actor.lr_sched.lr_decay_iters")
    if isinstance(written, str) and "max_epochs" in written:
        steps = config.actor.lr_sched.lr_decay_iters
        account.tell(
            f"lr_decay_iters={written} is a number of epochs read as optimizer steps: decay ends after step {steps}"
        )
    if get(account.tree, "data.type") == "vlm" and account.foreign:
        account.tell(
            "an epoch of RLinf's VLM fine-tuning covers 1/gradient_accumulation_steps of the data; here all of it"
        )


def _batch_notices(account: Account, config: RunConfig) -> None:
    tree, runner = account.tree, config.runner
    if config.algorithm.multi_agent:
        account.tell(
            "multi-agent actor: the real global batch is the number of sequences "
            "produced (padded to a multiple of dp x micro "
            "batch), the nominal one is shown"
        )
        if config.algorithm.n_minibatches > 1:
            account.tell(
                "multi-agent padding goes to dp x micro batch only, so "
                "n_minibatches > 1 may hit RLinf's split assertion"
            )
    down = get(tree, "algorithm.down_sampling")
    if isinstance(down, dict) and down.get("do_down_sampling") is True:
        keep = get(down, "down_sampling_config.down_sample_to_n")
        account.tell(
            f"down_sampling {config.algorithm.group_size}->{keep} per group: "
            "the real global batch is variable and smaller than "
            "the nominal one shown; micro batch must be 1"
        )
    if runner.enable_dynamic_batch_size and runner.max_tokens_per_mbs:
        cp = config.actor.model.context_parallel_size
        budget = runner.max_tokens_per_mbs
        account.tell(
            f"dynamic batch: the number of micro-batches depends on the data, budget {budget}*cp={budget * cp} tokens; "
            "gradient_accumulation_steps is the nominal, static number"
        )
    overwritten = (("actor.global_batch_size", "global_batch_size"), ("actor.micro_batch_size", "micro_batch_size"))
    for path, name in overwritten if is_rl(tree) else ():
        if has(tree, path) and path in account.owned:
            account.overridden[path] = (account.owned.pop(path), "RLinf's RL arithmetic overwrites it")
            account.tell(f"actor.{name} is overwritten by RLinf's RL batch arithmetic")
