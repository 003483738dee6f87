"""Where numbers go: metrics.jsonl always, the console on one rank, TensorBoard and Weights & Biases where asked for."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import deque
from pathlib import Path
from typing import IO, Any, Protocol

from hybrid5d.config.schema import RunConfig
from hybrid5d.console import say
from hybrid5d.engine.results import StepResult


def step_record(result: StepResult, mfu: float | None = None) -> dict[str, Any]:
    """One line of metrics.jsonl. Tokens are counted once, whatever the layout; `mfu` where it is known."""
    record: dict[str, Any] = {
        "step": result.step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "valid_tokens": result.valid_tokens,
        "tokens": result.tokens,
        "step_time_s": round(result.step_time_s, 6),
        "tokens_per_second": round(result.tokens / result.step_time_s, 3) if result.step_time_s > 0 else 0.0,
        "peak_memory_bytes": result.peak_memory_bytes,
        "padding": round(result.padding, 6),
        "rows_seen": list(result.rows_seen),
        **result.metrics,
    }
    if mfu is not None:
        record["mfu"] = round(mfu, 6)
    if result.loss_scale is not None:
        record["loss_scale"] = result.loss_scale
    if result.skipped:
        record["skipped"] = True
    if result.skipped_steps:
        record["skipped_steps"] = result.skipped_steps
    return record


class JsonLines:
    """Appends objects to a file, one a line, each whole when the call returns. NaN and infinities become null."""

    def __init__(self, path: Path):
        self.path = path
        self._file: IO[str] = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  open for the whole run

    def write(self, record: dict[str, Any]) -> None:
        """Append one object."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Tracker(Protocol):
    """A service that draws curves."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Values of one step, by name."""

    def close(self) -> None:
        """Flush and end."""


class TensorBoard:
    """Event files in a folder."""

    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """One run of Weights & Biases, in the project that runner.logger.project_name names."""

    def __init__(self, folder: Path, config: RunConfig):
        import wandb

        logger = config.runner.logger
        name = logger.experiment_name or config.runner.experiment_name
        self._run: Any = wandb.init(
            project=logger.project_name or "hybrid5d", name=name, dir=str(folder), config=config.to_tree()
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


def open_trackers(config: RunConfig, folder: Path) -> list[Tracker]:
    """The trackers of a run; `missing_trackers` was asked before."""
    logger, found = config.runner.logger, list[Tracker]()
    folder = Path(logger.log_path or folder)
    if "tensorboard" in logger.logger_backends:
        found.append(TensorBoard(folder / "tensorboard"))
    if "wandb" in logger.logger_backends:
        found.append(WandB(folder, config))
    return found


class Console:
    """Whole lines on standard output from one rank; silent on the others. No control codes."""

    def __init__(self, enabled: bool, total_steps: int | None, first_step: int = 0):
        self.enabled, self.total, self.first = enabled, total_steps, first_step
        self._ends: deque[float] = deque(maxlen=21)

    def say(self, text: str) -> None:
        """Print lines."""
        if self.enabled:
            say(text, sys.stdout)

    def step(self, result: StepResult, mfu: float | None = None) -> None:
        """The line of one step."""
        self._ends.append(time.perf_counter())
        self.say(step_line(result, self.total, self._eta(result.step), mfu))

    def _eta(self, step: int) -> float | None:
        """Seconds to the end at the pace of the last steps; the first step warms up and does not count."""
        if self.total is None or len(self._ends) < 2:
            return None
        pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return max(self.total - step, 0) * pace


def step_line(result: StepResult, total: int | None, eta: float | None, mfu: float | None = None) -> str:
    """step/total and per cent, loss, grad norm, lr, tokens/s, MFU where it is known, padding, memory, time left."""
    width = len(str(total or 0))
    head = f"step {result.step:>{width}}/{total} {result.step / total:>4.0%}" if total else f"step {result.step}"
    speed = result.tokens / result.step_time_s if result.step_time_s > 0 else 0.0
    parts = [
        head,
        f"loss {result.loss:.4f}",
        f"grad norm {result.grad_norm:.3f}",
        f"lr {result.lr:.2e}",
        f"{speed:,.0f} tok/s",
        *([] if mfu is None else [f"mfu {mfu:.1%}"]),
        *([f"pad {result.padding:.0%}"] if result.padding >= 0.005 else []),
        f"mem {result.peak_memory_bytes / 2**30:.2f} GiB",
    ]
    if result.loss_scale is not None:
        parts.append(f"scale {result.loss_scale:g}")
    if result.skipped:
        parts.append("skipped (gradients not finite)")
    if eta is not None:
        parts.append(f"eta {duration(eta)}")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """1:05, or 2:03:05 from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
