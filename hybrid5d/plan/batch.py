"""Batch arithmetic: rows per optimizer step, per micro-batch, and how many micro-batches; SFT's and RLinf's RL form."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid5d.config.schema import RunConfig
from hybrid5d.errors import ConfigError


@dataclass(frozen=True)
class BatchPlan:
    """In the user's terms: rows over all dp ranks per optimizer step, rows per dp rank and micro-batch."""

    global_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    dynamic: bool = False
    max_tokens_per_micro_batch: int | None = None  # of the whole cp group: runner.max_tokens_per_mbs * cp
    sequences_per_rl_step: int | None = None
    n_minibatches: int = 1


def plan_batch(config: RunConfig, dp: int) -> tuple[BatchPlan, list[ConfigError]]:
    """The batch plan for `dp` data-parallel replicas, and every rule it breaks (the plan is nominal then)."""
    errors: list[ConfigError] = []
    sequences: int | None = None
    minibatches = 1
    if config.is_rl:
        key_g, key_m = "data.rollout_batch_size", "algorithm.training_batch_size_per_gpu"
        micro = config.algorithm.training_batch_size_per_gpu
        minibatches = config.algorithm.n_minibatches
        sequences = (config.data.rollout_batch_size or 0) * config.algorithm.group_size
        total = sequences // minibatches
        errors += _rl_rules(config, dp, sequences)
    else:
        key_g, key_m = "actor.global_batch_size", "actor.micro_batch_size"
        micro = config.actor.micro_batch_size
        total = config.actor.global_batch_size or micro * dp
    if not errors:
        errors += _closes(total, micro, dp, key_g, key_m, config)
    steps = max(total // (micro * dp), 1)
    runner = config.runner
    budget = None
    if runner.enable_dynamic_batch_size and runner.max_tokens_per_mbs:
        budget = runner.max_tokens_per_mbs * config.actor.model.context_parallel_size
    return BatchPlan(
        max(total, 1), micro, steps, runner.enable_dynamic_batch_size, budget, sequences, minibatches
    ), errors


def _closes(total: int, micro: int, dp: int, key_g: str, key_m: str, config: RunConfig) -> list[ConfigError]:
    unit = micro * dp
    if total >= unit and total % unit == 0:
        return []
    low, high = total // unit * unit, (total // unit + 1) * unit
    near = " or ".join(str(n) for n in (low, high) if n > 0)
    rule = (
        f"global batch {total} is not a multiple of micro batch {micro} x dp {dp} = {unit} "
        f"(gradient accumulation = {total} / {unit} = {total / unit:.4g})"
    )
    value = config.data.rollout_batch_size if key_g.startswith("data.") else config.actor.global_batch_size
    what = "a global batch" if not key_g.startswith("data.") else "rollout_batch_size x group_size / n_minibatches"
    return [ConfigError(key_g, value, rule, f"use {what} of {near}, or change {key_m}")]


def _rl_rules(config: RunConfig, dp: int, sequences: int) -> list[ConfigError]:
    errors: list[ConfigError] = []
    multi_agent = config.algorithm.multi_agent
    prompts, n = config.data.rollout_batch_size or 0, config.algorithm.n_minibatches
    key = "data.rollout_batch_size"
    if multi_agent and prompts < dp:
        errors.append(ConfigError(key, prompts, f"each of the dp={dp} ranks needs a prompt", f"use {dp} or more"))
    elif config.keys is not None and config.keys.foreign and not multi_agent and prompts % dp:
        near = " or ".join(str(k) for k in (prompts // dp * dp, (prompts // dp + 1) * dp) if k)
        rule = f"prompts per RL step are spread over dp={dp} ranks, {prompts} % {dp} = {prompts % dp}"
        errors.append(ConfigError(key, prompts, rule, f"use {near}"))
    if sequences % dp and not errors:
        rule = f"rollout_batch_size x group_size = {sequences} sequences do not divide by dp={dp}"
        errors.append(ConfigError(key, prompts, rule, f"make the product a multiple of {dp}"))
    if not errors and (sequences // dp) % n:
        rule = f"{sequences // dp} sequences per dp rank do not divide by it"
        closest = next(k for k in range(min(n, sequences // dp), 0, -1) if (sequences // dp) % k == 0)
        fix = f"use a divisor of {sequences // dp}, such as {closest}"
        errors.append(ConfigError("algorithm.n_minibatches", n, rule, fix))
    split = config.algorithm.logprob_forward_micro_batch_size
    if not errors and split and not config.runner.enable_dynamic_batch_size:
        per_rank = sequences // dp
        parts = max(1, per_rank // split)
        if per_rank % parts:
            rule = f"{per_rank} sequences per dp rank do not split into {parts} equal parts"
            key = "algorithm.logprob_forward_micro_batch_size"
            errors.append(ConfigError(key, split, rule, f"use a divisor of {per_rank}"))
    return errors
