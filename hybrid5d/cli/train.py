"""`hybrid5d train RUN.yaml` and `hybrid5d eval RUN.yaml`: check, then start the ranks on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybrid5d.cli.options import Overrides, Run, refuse
from hybrid5d.errors import HybridError
from hybrid5d.launch.preflight import Argv
from hybrid5d.launch.start import LAUNCHERS, launch
from hybrid5d.plan.draft import Purpose

NumProcs = Annotated[
    int | None, typer.Option(min=1, help="processes to start; default: tensor x pipeline x context parallel size")
]
Launcher = Annotated[
    str | None, typer.Option(help=f"{', '.join(LAUNCHERS)}; default: deepspeed, and plain python for one process")
]


def train(run: Run, overrides: Overrides = None, num_procs: NumProcs = None, launcher: Launcher = None) -> None:
    """Train. Exit 0: the run reached its end; 1: it failed; 2: refused; 3: stopped by SIGTERM, all saved."""
    _start(run, overrides, num_procs, launcher, "train")


def evaluate(run: Run, overrides: Overrides = None, num_procs: NumProcs = None, launcher: Launcher = None) -> None:
    """Loss and perplexity over data.val_data_paths: start weights, or the checkpoint that runner.resume_dir names."""
    _start(run, overrides, num_procs, launcher, "eval")


def _start(
    run: Path, overrides: list[str] | None, num_procs: int | None, launcher: str | None, purpose: Purpose
) -> None:
    try:
        code = launch(Argv(run, tuple(overrides or ())), num_procs, launcher, purpose)
    except HybridError as exc:
        refuse(str(exc))
    raise typer.Exit(code)
