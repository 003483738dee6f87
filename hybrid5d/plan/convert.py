"""A whole translation: read, plan, account. What `hybrid5d convert` shows, as one object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hybrid5d.config.loaded import KeyReport, LoadedYaml
from hybrid5d.errors import ConfigError, best_effort, touches
from hybrid5d.load import load_yaml
from hybrid5d.plan.outputs import layout_summary
from hybrid5d.plan.report import emit_engine, report_of
from hybrid5d.plan.rules import CLUSTER, actor_world
from hybrid5d.plan.run import RunPlan, examine


@dataclass
class Translation:
    """Verdict, numbers and account. `plan` is there where every key has a usable value, also when refused."""

    keys: KeyReport
    plan: RunPlan | None = None
    errors: list[ConfigError] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """translate or refuse."""
        return "refuse" if self.errors else "translate"

    @property
    def report(self) -> list[dict[str, Any]]:
        """What became of each key."""
        return report_of(self.keys, self.plan)

    def to_dict(self) -> dict[str, Any]:
        """The object that `--format json` prints."""
        plan = self.plan
        parts = dict.fromkeys(("layout", "batch", "optimizer", "schedule", "precision", "deepspeed", "engine"))
        return {
            "verdict": self.verdict,
            "errors": [e.to_dict() for e in self.errors],
            **(parts if plan is None else _parts(plan)),
            "report": self.report,
            "notices": self.notices,
            "unchecked": [] if plan is None else list(plan.unchecked),
        }


def _parts(plan: RunPlan) -> dict[str, Any]:
    optimizer, precision = plan.deepspeed["optimizer"], plan.precision
    params = optimizer["params"]
    return {
        "layout": layout_summary(plan),
        "batch": asdict(plan.batch),
        "optimizer": {"type": optimizer["type"]}
        | {name: params.get(name) for name in ("lr", "betas", "eps", "weight_decay", "momentum")},
        "schedule": plan.schedule.to_dict(),
        "precision": {
            "dtype": precision.dtype,
            "loss_scale": "dynamic" if precision.dynamic_loss_scale else precision.loss_scale,
        },
        "deepspeed": plan.deepspeed,
        "engine": emit_engine(plan).tree,
    }


def translate(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    gpus_per_node: int = 8,
    world_size: int | None = None,
    model: str | None = None,
) -> Translation:
    """Translate a YAML; never raises for what the file says."""
    loaded = load_yaml(path, [*overrides, *([f"actor.model.model_path={model}"] if model else [])])
    result = Translation(loaded.keys, errors=list(loaded.errors), notices=list(loaded.keys.notices))
    if loaded.config is None:
        return result

    def find() -> list[ConfigError]:
        world, errors = _world(loaded, gpus_per_node, world_size, result.notices)
        assert loaded.config is not None  # looked at above
        result.plan, faults = examine(loaded.config, world, gpus_per_node=gpus_per_node, invalid=loaded.keys.invalid)
        return [*errors, *faults]

    faults = best_effort(find) if loaded.keys.invalid else find()
    result.errors += [e for e in faults if e not in result.errors]
    result.errors += _model_folder(result.errors, model)
    if result.plan is not None:
        unchecked = [f"unchecked: {rule}" for rule in result.plan.unchecked]
        result.notices = list(dict.fromkeys([*result.plan.notices, *result.notices, *unchecked]))
    return result


def _world(
    loaded: LoadedYaml, gpus_per_node: int, world_size: int | None, notices: list[str]
) -> tuple[int | None, list[ConfigError]]:
    """The actor's processes: as asked for, as the cluster describes them, or at least one replica."""
    config, invalid = loaded.config, loaded.keys.invalid
    assert config is not None  # the caller looked
    if touches(CLUSTER, invalid):
        return world_size, []
    placement, errors = actor_world(config, gpus_per_node)
    if world_size is None:
        return config.actor.model.ranks_per_replica if placement is None else placement.processes, errors
    if placement is not None and placement.processes != world_size and not invalid:
        notices.append(f"--world-size {world_size} replaces the {placement.processes} processes of component_placement")
    return world_size, []


def _model_folder(errors: list[ConfigError], model: str | None) -> list[ConfigError]:
    if model is None or (Path(model).expanduser() / "config.json").is_file():
        return []
    if any(e.key.startswith("actor.model.model_path") for e in errors):
        return []
    return [ConfigError("--model", model, "the folder has no config.json", "give a Hugging Face model folder")]
