"""The run directory: what was run, with what, and what came of it. Written by one rank (or the launcher), read by all.

OUTPUT_DIR/EXPERIMENT_NAME/
  resolved.yaml  ds_config.json  layout.json  accelerate.yaml    the plan
  env.json                                                       versions, machine, launcher
  metrics.jsonl  eval.jsonl                                      one object a step / an evaluation
  trace/                                                         times of the steps of runner.trace_steps, by rank
  checkpoints/  hf/                                              training checkpoints, the exported model
  result.json                                                    after a run that reached its end or stopped as asked
  run.lock                                                       who uses the folder now
  earlier-1/ ...                                                 what earlier runs left here, whole
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid5d.checkpoint.manifest import checkpoints, critic_beside, resolve_resume
from hybrid5d.errors import EXIT_REFUSED, ConfigError, ConfigErrors
from hybrid5d.files import write_whole
from hybrid5d.plan.outputs import json_text, plan_files, write_files
from hybrid5d.plan.run import RunPlan
from hybrid5d.train.lock import LOCK

ENV, METRICS, EVALS, RESULT, CHECKPOINTS, HF, TRACE = (
    "env.json", "metrics.jsonl", "eval.jsonl", "result.json", "checkpoints", "hf", "trace",
)  # fmt: skip
_PREVIOUS, ASIDE = "result.previous.json", "earlier-"
TRACE_FORMAT = 1  # of the files in `trace/`


def trace_file(rank: int) -> str:
    """Name of a rank's file in `trace/`."""
    return f"rank-{rank}.json"


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

    def prepare(self, plan: RunPlan) -> list[str]:
        """Make the folder this run's, which holds its lock: an earlier run goes aside, the plan's files are written.

        A run that resumes from a checkpoint of this folder continues what lies there; nothing is moved.

        Returns:
            What was kept aside, for the user.

        Raises:
            ConfigErrors: the directory cannot be made or written.
            CheckpointError: as `source` does; nothing was touched.
        """
        source = self.source(plan)
        try:
            notices = [] if source is not None and self._holds(source) else self._keep_aside(self._earlier_run())
            self._forget_result()
            write_files(self.path, plan_files(plan, self.path))
        except OSError as exc:
            raise ConfigErrors([_unwritable(self.path, exc)]) from None
        return notices

    def source(self, plan: RunPlan) -> Path | None:
        """The `actor` folder that a start here goes on from (None: from the start), by what its files show.

        Raises:
            CheckpointError: `runner.resume_dir` names no whole checkpoint, or one without the critic that is trained.
        """
        source = resolve_resume(plan.config.runner.resume_dir, self / CHECKPOINTS).source
        if source is not None and plan.critic is not None:
            critic_beside(source)
        return source

    def prepare_evaluation(self, plan: RunPlan) -> list[str]:
        """The plan's files, and no result, in the folder of an evaluation; there is nothing to keep aside.

        Raises:
            ConfigErrors: the directory cannot be made or written.
            CheckpointError: as `source` of the run's folder does; nothing was touched.
        """
        RunFolder.of(plan).source(plan)
        try:
            self._forget_result()
            write_files(self.path, plan_files(plan, self.path))
        except OSError as exc:
            raise ConfigErrors([_unwritable(self.path, exc)]) from None
        return []

    def unwritable(self) -> ConfigError | None:
        """Why the directory could not be made or written, or None. Nothing is made."""
        place = self.path
        while not place.exists() and place != place.parent:
            place = place.parent
        if place.is_dir() and os.access(place, os.W_OK | os.X_OK):
            return None
        return _unwritable(self.path, OSError(0, f"{place} is {'read-only' if place.is_dir() else 'no folder'}"))

    def keep_later(self, step: int) -> list[str]:
        """Checkpoints after `step`, from which this run goes on, are of a branch that it leaves: they go aside."""
        later = [folder for at, folder in checkpoints(self / CHECKPOINTS) if at > step]
        return self._keep_aside(later, f"checkpoints after step {step} are")

    def _holds(self, path: Path) -> bool:
        return path.resolve().is_relative_to(self.path.resolve())

    def _earlier_run(self) -> list[Path]:
        """Everything here, where a run left more than its settings."""
        ended = (self / RESULT).exists() and self.exit_code() != EXIT_REFUSED
        if not ended and not any((self / name).exists() for name in (CHECKPOINTS, HF, METRICS)):
            return []
        return [p for p in sorted(self.path.iterdir()) if p.name != LOCK and not p.name.startswith(ASIDE)]

    def _keep_aside(self, paths: list[Path], what: str = "what an earlier run left there is") -> list[str]:
        if not paths:
            return []
        number = 1
        while (target := self / f"{ASIDE}{number}").exists():
            number += 1
        for path in paths:
            place = target / path.relative_to(self.path)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, place)
        return [f"{self.path}: {what} kept in {target.name}/"]

    def _forget_result(self) -> None:
        """From here on result.json means that this start reached the end; `earlier_result` still knows the old one."""
        if self.exit_code() == EXIT_REFUSED:
            (self / RESULT).unlink()
        elif (self / RESULT).exists():
            os.replace(self / RESULT, self / _PREVIOUS)

    def write_environment(self, record: Mapping[str, Any]) -> None:
        """env.json: what a bug report needs."""
        write_files(self.path, {ENV: json_text(dict(record))})

    def open_metrics(self, first_step: int, first_eval: int | None = None) -> None:
        """Lines of steps after `first_step` (evaluations: `first_eval`) are cut: this run writes them anew."""
        for name, last in ((METRICS, first_step), (EVALS, first_step if first_eval is None else first_eval)):
            if (self / name).exists():
                _cut(self / name, last)

    def last_loss(self, step: int) -> float | None:
        """Training loss that metrics.jsonl gives for a step; None where it has none."""
        lines = records(self / METRICS) if (self / METRICS).exists() else []
        return next((r.get("loss") for r in reversed(lines) if r["step"] == step), None)

    def earlier_result(self, step: int) -> dict[str, Any] | None:
        """What the last start here wrote into result.json, if it ended at `step`."""
        try:
            record = json.loads((self / _PREVIOUS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return record if isinstance(record, dict) and record.get("steps") == step else None

    def write_result(self, values: Mapping[str, Any]) -> None:
        """result.json, the mark of a run that reached its end or stopped as asked (its `exit_code`)."""
        write_files(self.path, {RESULT: json_text(dict(values))})
        (self / _PREVIOUS).unlink(missing_ok=True)

    def write_refusal(self) -> None:
        """result.json of a start that ranks refused: some launchers turn their exit code into 1."""
        with contextlib.suppress(OSError):
            write_files(self.path, {RESULT: json_text({"exit_code": EXIT_REFUSED})})

    def exit_code(self) -> int | None:
        """What the run of this start says of its end, whatever its launcher returned; None: it did not come to one."""
        try:
            return int(json.loads((self / RESULT).read_text(encoding="utf-8"))["exit_code"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _unwritable(path: Path, exc: OSError) -> ConfigError:
    return ConfigError("runner.output_dir", str(path), f"cannot be written: {exc.strerror}", "choose another folder")


def records(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSONL file that have a step; a last line that a killed run left half-written is not one."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
            found.append({**record, "step": int(record["step"])})
        except (ValueError, KeyError, TypeError):
            continue
    return found


def _cut(path: Path, last: int) -> None:
    write_whole(path, "".join(json.dumps(r) + "\n" for r in records(path) if r["step"] <= last))
