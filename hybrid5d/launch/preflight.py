"""Everything about a run that can be refused before torch is imported or a process group exists; all of it at once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hybrid5d.errors import ConfigError, ConfigErrors, best_effort
from hybrid5d.launch.env import launcher_conflicts, launcher_notices
from hybrid5d.load import load_yaml
from hybrid5d.plan.draft import Purpose
from hybrid5d.plan.run import RunPlan, examine
from hybrid5d.plan.tensors import freeze_errors, shapes

_DEGREES = tuple(f"actor.model.{n}_parallel_size" for n in ("tensor_model", "pipeline_model", "context"))


@dataclass(frozen=True)
class Argv:
    """A command line: the YAML and what is changed in it."""

    config: Path
    overrides: tuple[str, ...] = ()


def plan_run(argv: Argv, world_size: int | None, purpose: Purpose = "train") -> tuple[RunPlan, tuple[str, ...]]:
    """The plan of a run, and what the user should know. The YAML is read once.

    Args:
        world_size: processes; None: as many as one replica of the model needs.

    Raises:
        ConfigErrors: everything that is wrong, one line each.
    """
    loaded = load_yaml(argv.config, argv.overrides)
    config, invalid = loaded.config, loaded.keys.invalid
    if config is None:
        raise ConfigErrors(loaded.errors)
    if world_size is None and not invalid.intersection(_DEGREES):
        world_size = config.actor.model.ranks_per_replica
    plan: RunPlan | None = None

    def find() -> list[ConfigError]:
        nonlocal plan
        plan, faults = examine(config, world_size, purpose, invalid=invalid)
        return faults if plan is None else [*faults, *launcher_conflicts(os.environ, plan), *_frozen(plan)]

    faults = best_effort(find) if invalid else find()
    errors = [*loaded.errors, *(e for e in faults if e not in loaded.errors)]
    if errors or plan is None:
        raise ConfigErrors(errors)
    return plan, (*plan.notices, *launcher_notices(os.environ, plan))


def _frozen(plan: RunPlan) -> list[ConfigError]:
    """Globs that match nothing, or everything. Not among the plan's rules: layers of one's own have other names."""
    if plan.model is None:
        return []
    return freeze_errors(plan.config.actor.freeze_parameters, shapes(plan.model))
