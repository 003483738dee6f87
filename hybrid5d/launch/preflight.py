"""Everything about a run that can be refused before torch is imported or a process group exists; all of it at once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from hybrid5d.config.schema import RunConfig
from hybrid5d.errors import ConfigError, ConfigErrors, SpoiltKey, best_effort, judged
from hybrid5d.launch.env import LaunchEnv, launcher_conflicts, launcher_notices
from hybrid5d.plan.run import RunPlan, build_plan, find_faults
from hybrid5d.rlinf.account import Document
from hybrid5d.rlinf.load import load_document

_TRACKERS = {"tensorboard": "tensorboard", "wandb": "wandb"}


@dataclass(frozen=True)
class Words:
    """A command line: the YAML and what is changed in it."""

    config: Path
    overrides: tuple[str, ...] = ()


def plan_run(words: Words, env: LaunchEnv, *, evaluate: bool = False) -> tuple[RunPlan, tuple[str, ...]]:
    """The plan of a run on the started processes, and what the user should know.

    Raises:
        ConfigErrors: everything that is wrong, one line each.
    """
    document = load_document(words.config, words.overrides)
    config = document.config
    if not isinstance(config, RunConfig) or document.account.spoilt:
        raise ConfigErrors(_refusal(document, env.world_size, evaluate))
    errors = [*document.errors, *_run_rules(config, evaluate)]
    try:
        plan = build_plan(config, env.world_size, evaluate=evaluate)
    except ConfigErrors as exc:
        errors += [e for e in exc.errors if e not in errors]
    else:
        errors += launcher_conflicts(os.environ, plan)
        if not errors:
            return plan, (*plan.notices, *launcher_notices(os.environ, plan))
    raise ConfigErrors(errors)


def default_processes(words: Words, *, evaluate: bool = False) -> int:
    """Processes that the layout needs at least: tp x pp x cp.

    Raises:
        ConfigErrors: the degrees are not known; everything that is wrong, as far as it does not depend on them.
    """
    document = load_document(words.config, words.overrides)
    try:
        if document.judged is None:
            raise SpoiltKey
        model = document.judged.actor.model
        return model.tensor_model_parallel_size * model.pipeline_model_parallel_size * model.context_parallel_size
    except SpoiltKey:
        raise ConfigErrors(_refusal(document, None, evaluate)) from None


def _refusal(document: Document, world_size: int | None, evaluate: bool) -> list[ConfigError]:
    """The faults of a file that cannot be used, then those of the rest of it."""
    errors, rest = list(document.errors), document.judged
    if rest is not None:
        further = best_effort(
            lambda: _run_rules(rest, evaluate) + find_faults(rest, world_size, training=True, evaluate=evaluate)
        )
        errors += [e for e in further if e not in errors]
    return errors


def _run_rules(config: RunConfig, evaluate: bool) -> list[ConfigError]:
    return judged([missing_trackers, *([_evaluation_rules] if evaluate else [])], config)


def missing_trackers(config: RunConfig) -> list[ConfigError]:
    """Trackers that the YAML asks for and that are not installed."""
    key = "runner.logger.logger_backends"
    return [
        ConfigError(key, name, f"{package} is not installed", f"pip install 'hybrid5d[{name}]', or leave it out")
        for name, package in _TRACKERS.items()
        if name in config.runner.logger.logger_backends and find_spec(package) is None
    ]


def _evaluation_rules(config: RunConfig) -> list[ConfigError]:
    if config.data.val_data_paths:
        return []
    return [ConfigError("data.val_data_paths", None, "an evaluation needs data", "name files, folders or globs")]
