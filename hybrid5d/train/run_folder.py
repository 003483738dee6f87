"""The run directory: what was run, with what, and what came of it. Written by one rank (or the launcher), read by all.

OUTPUT_DIR/EXPERIMENT_NAME/
  resolved.yaml  ds_config.json  layout.json  accelerate.yaml    the plan
  env.json                                                       versions, machine, launcher
  metrics.jsonl  eval.jsonl                                      one object a step / an evaluation
  checkpoints/  hf/                                              training checkpoints, the exported model
  errors/rank3.txt                                               tracebacks of ranks that failed
  result.json                                                    only after a run that reached its end
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid5d.errors import ConfigError, ConfigErrors
from hybrid5d.plan.outputs import json_text, plan_files, write_files
from hybrid5d.plan.run import RunPlan

ENV, METRICS, EVALS, RESULT, CHECKPOINTS, HF = (
    "env.json", "metrics.jsonl", "eval.jsonl", "result.json", "checkpoints", "hf",
)  # fmt: skip


class RunFolder:
    """Paths inside a run directory."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    @classmethod
    def of(cls, plan: RunPlan) -> RunFolder:
        """The directory that `runner.output_dir` and `runner.experiment_name` name."""
        return cls(Path(plan.config.runner.output_dir) / plan.config.runner.experiment_name)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def prepare(self, plan: RunPlan) -> None:
        """Write the plan's files and forget the result of an earlier run.

        Raises:
            ConfigErrors: the directory cannot be made or written.
        """
        try:
            write_files(self.path, plan_files(plan, self.path))
            (self / RESULT).unlink(missing_ok=True)
        except (ConfigErrors, OSError) as exc:
            reason = exc.errors[0].rule if isinstance(exc, ConfigErrors) else str(exc.strerror)
            error = ConfigError("runner.output_dir", str(self.path), reason, "choose another folder")
            raise ConfigErrors([error]) from None

    def write_environment(self, record: Mapping[str, Any]) -> None:
        """env.json: what a bug report needs."""
        write_files(self.path, {ENV: json_text(dict(record))})

    def open_metrics(self, first_step: int) -> None:
        """Make room for this run's lines: those from `first_step` on are cut; a fresh start keeps old files aside."""
        for name in (METRICS, EVALS):
            path = self / name
            if not path.exists():
                continue
            if first_step == 0:
                os.replace(path, _unused(path))
            else:
                _cut(path, first_step)

    def write_result(self, values: Mapping[str, Any]) -> None:
        """result.json, the mark of a run that reached its end."""
        write_files(self.path, {RESULT: json_text(dict(values))})

    def finished(self) -> bool:
        """A run reached its end here."""
        return (self / RESULT).is_file()


def _unused(path: Path) -> Path:
    """metrics.jsonl -> metrics.1.jsonl, or the next number that is free."""
    number = 1
    while (found := path.with_suffix(f".{number}{path.suffix}")).exists():
        number += 1
    return found


def _cut(path: Path, first_step: int) -> None:
    """Drop lines of steps after `first_step`, and a last line that a killed run left half-written."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if int(json.loads(line)["step"]) <= first_step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    part = path.with_name(f".{path.name}.part")
    part.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    os.replace(part, path)
