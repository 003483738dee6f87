"""Rules of runner.trace_steps."""

from __future__ import annotations

from hybrid5d.config.schema import RunConfig
from hybrid5d.errors import ConfigError, reads
from hybrid5d.plan.draft import Draft


@reads("runner.trace_steps", "runner.max_steps", "runner.task_type", "data.rollout_batch_size")
def trace_steps(draft: Draft) -> list[ConfigError]:
    """The steps that are traced come in the run, in order."""
    most = draft.config.runner.max_steps
    return trace_faults(draft.config, most if most >= 0 else None)


def trace_faults(config: RunConfig, total: int | None) -> list[ConfigError]:
    """What is wrong with runner.trace_steps in a run of `total` steps (None: not known)."""
    if config.runner.trace_steps is None:
        return []
    first, last = config.runner.trace_steps
    if config.is_rl:
        rule = "steps of supervised training are traced, RL steps are not"
        return [ConfigError("runner.trace_steps", [first, last], rule, "set it to null")]
    fix = f"use [first, last] with 1 <= first <= last{'' if total is None else f' <= {total}'}, or null"
    if not 1 <= first <= last:
        rule = "steps are counted from 1, and the first one is not after the last"
    elif total is not None and last > total:
        rule = f"the run has {total} steps"
    else:
        return []
    return [ConfigError("runner.trace_steps", [first, last], rule, fix)]
