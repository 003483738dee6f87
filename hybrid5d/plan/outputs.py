"""The files that describe a plan: ds_config.json, accelerate.yaml, layout.json, resolved.yaml, report.json."""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hybrid5d.config.schema import RunConfig
from hybrid5d.config.tree import drop
from hybrid5d.config.yaml_file import dump_yaml, parse_yaml, read_text, unescaped
from hybrid5d.errors import ConfigError, ConfigErrors
from hybrid5d.files import write_whole
from hybrid5d.plan.accelerate_config import accelerate_config
from hybrid5d.plan.layout import AXES, RANK_ORDER
from hybrid5d.plan.run import RunPlan

DS_CONFIG, ACCELERATE, LAYOUT, RESOLVED, REPORT, CRITIC = (
    "ds_config.json", "accelerate.yaml", "layout.json", "resolved.yaml", "report.json", "critic_ds_config.json",
)  # fmt: skip
_NUMBERS = re.compile(r"\[\s+([-0-9.e,\s]+?)\s+\]")
_HEAD = "# Resolved by hybrid5d: every default written out, no reference left. Starts the same run as the original.\n"


def layout_summary(plan: RunPlan) -> dict[str, Any]:
    """Degrees, rank order and stages."""
    layout = plan.layout
    return {
        "world_size": layout.world_size,
        "tp": layout.tp,
        "pp": layout.pp,
        "cp": layout.cp,
        "dp": layout.dp,
        "sequence_parallel": plan.sequence_parallel,
        "rank_order": RANK_ORDER,
        "decoder_layers_per_stage": list(plan.stages) or None,
    }


def layout_document(plan: RunPlan) -> dict[str, Any]:
    """layout.json: the summary, groups of each axis, and every rank's coordinate."""
    layout = plan.layout
    return layout_summary(plan) | {
        "groups": {axis: layout.groups(axis) for axis in reversed(AXES)} | {"dp_cp": layout.groups("dp", "cp")},
        "rank_columns": ["rank", *reversed(AXES)],
        "ranks": [
            [rank, *(getattr(layout.coordinate(rank), axis) for axis in reversed(AXES))]
            for rank in range(layout.world_size)
        ],
    }


def resolved_text(config: RunConfig) -> str:
    """resolved.yaml. Loading it gives an equal config, so a run from it is the same run."""
    tree = config.to_tree()
    if config.is_rl:
        for path in ("actor.micro_batch_size", "actor.global_batch_size"):  # RL arithmetic decides both
            drop(tree, path)
    return _HEAD + dump_yaml(tree)


def write_settings(folder: str | Path, config: RunConfig) -> str:
    """Write resolved.yaml; returns its digest, which the launcher gives the ranks on their command line.

    Raises:
        OSError: the folder cannot be made or written.
    """
    text = resolved_text(config)
    write_files(folder, {RESOLVED: text})
    return _digest(text)


def read_settings(folder: str | Path, digest: str | None = None) -> RunConfig:
    """The settings that a launcher wrote: valid already, so nothing is composed, resolved or classified again.

    Raises:
        ConfigErrors: the file is gone, no longer valid, or not the one with this digest.
    """
    path = Path(folder) / RESOLVED
    text = read_text(path)
    if digest is not None and _digest(text) != digest:
        rule = "was changed after the launcher wrote it: another run uses this folder"
        raise ConfigErrors([ConfigError("--run-dir", str(path), rule, "give each run a runner.experiment_name")])
    try:
        return RunConfig.model_validate(unescaped(parse_yaml(text, str(path))))
    except ValidationError as exc:
        rule = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in exc.errors(include_url=False))
        fix = "start it with `hybrid5d train`, which says what each key may be"
        raise ConfigErrors([ConfigError("--run-dir", str(path), rule, fix)]) from None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def json_text(value: Any) -> str:
    """Stable JSON, lists of numbers on one line, with a final newline."""
    text = json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False)
    return _NUMBERS.sub(lambda m: f"[{' '.join(m.group(1).split())}]", text) + "\n"


def _finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity: they become text, as YAML spells them."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def plan_files(plan: RunPlan, folder: str | Path = "") -> dict[str, str]:
    """File name -> content of everything that a launcher or worker reads; `folder` is where they will lie."""
    nodes, ds_config = plan.config.cluster.num_nodes, (Path(folder) / DS_CONFIG).as_posix()
    return {
        DS_CONFIG: json_text(plan.deepspeed),
        ACCELERATE: dump_yaml(accelerate_config(plan.layout.world_size, nodes, ds_config)),
        LAYOUT: json_text(layout_document(plan)),
        RESOLVED: resolved_text(plan.config),
        **({CRITIC: json_text(plan.critic.deepspeed)} if plan.critic is not None else {}),
    }


def write_files(folder: str | Path, files: dict[str, str]) -> None:
    """Make the folder and write each file whole.

    Raises:
        OSError: the folder cannot be made or written.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_whole(target / name, text)
