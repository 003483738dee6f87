"""The plan of a run: everything that is known before a process group exists. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from hybrid5d.config.schema import RunConfig
from hybrid5d.errors import ConfigError, ConfigErrors, run_rules
from hybrid5d.hf.spec import ModelSpec
from hybrid5d.plan.batch import BatchPlan
from hybrid5d.plan.critic import critic_config, critic_errors, critic_notices
from hybrid5d.plan.deepspeed_config import PrecisionPlan, asked_zero_stage
from hybrid5d.plan.draft import Draft, Purpose
from hybrid5d.plan.emitted import Emitted
from hybrid5d.plan.layout import ParallelLayout
from hybrid5d.plan.lr import LRSchedule
from hybrid5d.plan.notices import plan_notices
from hybrid5d.plan.pipeline import Schedule
from hybrid5d.plan.rules import RULES, RUN_RULES


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
    pipeline: Schedule
    stages: tuple[int, ...]  # decoder layers per pipeline stage, in model order; () where the model is unknown
    schedule: LRSchedule
    precision: PrecisionPlan
    zero_stage: int
    clip_grad: float
    recompute: RecomputePlan
    emitted: Emitted  # the ds_config, and which keys it was made of
    notices: tuple[str, ...] = ()
    critic: RunPlan | None = None  # of PPO's value model, on the same processes
    unchecked: tuple[str, ...] = ()  # rules that lack the model's numbers, with what would be legal

    @property
    def deepspeed(self) -> dict[str, Any]:
        """The ds_config."""
        return self.emitted.tree


def build_plan(config: RunConfig, world_size: int, purpose: Purpose = "train") -> RunPlan:
    """The plan of `config` on `world_size` processes.

    Raises:
        ConfigErrors: all violations, one line each.
    """
    plan, errors = examine(config, world_size, purpose)
    if errors or plan is None:
        raise ConfigErrors(errors)
    return plan


def examine(
    config: RunConfig,
    world_size: int | None,
    purpose: Purpose = "translate",
    *,
    gpus_per_node: int | None = None,
    invalid: Collection[str] = (),
) -> tuple[RunPlan | None, list[ConfigError]]:
    """The plan as far as it can be made, and every violation, in one pass.

    Args:
        world_size: processes; None: not known, as the keys in `invalid`. There is no plan then, and rules that read
            such a key are left out.
        gpus_per_node: where it is known.
    """
    draft = Draft(config, world_size, purpose, gpus_per_node, invalid)
    plan, errors = _examined(draft)
    if not config.has_critic:
        return plan, errors
    critic, more = _critic(config, draft, errors)
    if plan is not None and critic is not None:
        new = (n.replace("actor.", "critic.") for n in critic.notices if n not in plan.notices)
        notices = (*plan.notices, *critic_notices(config), *(f"critic: {n}" for n in new))
        plan = replace(plan, critic=critic, notices=notices)
    return plan, [*errors, *more]


def _critic(config: RunConfig, draft: Draft, known: list[ConfigError]) -> tuple[RunPlan | None, list[ConfigError]]:
    """The critic's plan, and its faults that the actor's run has not."""
    invalid = {key for key in draft.invalid if not key.startswith("actor.")}
    invalid |= {key.replace("critic.", "actor.", 1) for key in draft.invalid if key.startswith("critic.")}
    own = replace(draft, config=critic_config(config), invalid=invalid, unchecked=[], value_head=True)
    plan, errors = _examined(own)
    return plan, critic_errors(errors, known)


def _examined(draft: Draft) -> tuple[RunPlan | None, list[ConfigError]]:
    """The plan of one model, and its faults."""
    errors = run_rules(RULES if draft.translation else (*RULES, *RUN_RULES), draft, draft.unknown)
    return None if draft.unknown else _plan(draft), errors


def _plan(draft: Draft) -> RunPlan:
    config = draft.config
    return RunPlan(
        config=config,
        model=draft.spec,
        layout=draft.layout,
        sequence_parallel=config.actor.model.sequence_parallel,
        batch=draft.batch,
        pipeline=draft.pipeline,
        stages=draft.stages,
        schedule=draft.schedule,
        precision=draft.precision,
        zero_stage=max(1, asked_zero_stage(config)),
        clip_grad=config.actor.optim.clip_grad,
        recompute=_recompute(config),
        emitted=draft.deepspeed,
        notices=plan_notices(draft),
        unchecked=_unchecked(draft),
    )


def _unchecked(draft: Draft) -> tuple[str, ...]:
    if not draft.unchecked:
        return ()
    first, *rest = draft.unchecked
    folder = draft.config.actor.model.model_path or "no model_path"
    return f"{first}. The model folder ({folder}) is not here; give --model DIR to check", *rest


def _recompute(config: RunConfig) -> RecomputePlan:
    model = config.actor.model
    if model.recompute_granularity != "full":
        return RecomputePlan(model.recompute_granularity)
    return RecomputePlan("full", model.recompute_method, model.recompute_num_layers)
