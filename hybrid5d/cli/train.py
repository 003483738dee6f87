"""`hybrid5d train RUN.yaml` and `hybrid5d eval RUN.yaml`: check, then start the ranks on this machine."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hybrid5d.cli.options import Overrides, Run, refuse
from hybrid5d.console import say
from hybrid5d.errors import HybridError
from hybrid5d.launch.elastic import elastic
from hybrid5d.launch.preflight import Argv
from hybrid5d.launch.restart import supervise
from hybrid5d.launch.start import LAUNCHERS, dry_run, launch
from hybrid5d.plan.draft import Purpose

NumProcs = Annotated[
    int | None, typer.Option(min=1, help="processes to start; default: tensor x pipeline x context parallel size")
]
Launcher = Annotated[
    str | None, typer.Option(help=f"{', '.join(LAUNCHERS)}; default: deepspeed, and plain python for one process")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="check everything, read the data, say it, start nothing")]


Restarts = Annotated[
    int | None, typer.Option(min=1, help="start again after a death, at most N times with no new whole checkpoint")
]


Fits = Annotated[
    bool,
    typer.Option("--elastic", help="take the nearest layout that --num-procs, or the GPUs here, can form; same batch"),
]


def train(
    run: Run, overrides: Overrides = None, num_procs: NumProcs = None, launcher: Launcher = None, dry: DryRun = False,
    restarts: Restarts = None, fits: Fits = False,
) -> None:  # fmt: skip
    """Train. Exit 0: the run reached its end; 1: it failed; 2: refused; 3: stopped by SIGTERM, all saved."""
    _start(Argv(run, tuple(overrides or ())), num_procs, launcher, dry, "train", restarts, fits)


def evaluate(
    run: Run, overrides: Overrides = None, num_procs: NumProcs = None, launcher: Launcher = None, dry: DryRun = False
) -> None:
    """Loss and perplexity over data.val_data_paths: start weights, or the checkpoint that runner.resume_dir names."""
    _start(Argv(run, tuple(overrides or ())), num_procs, launcher, dry, "eval")


def _start(
    argv: Argv, num_procs: int | None, launcher: str | None, dry: bool, purpose: Purpose, restarts: int | None = None,
    fits: bool = False,
) -> None:  # fmt: skip
    try:
        if dry and restarts is not None:
            refuse("--dry-run --restarts: a dry run starts nothing that could die. Fix: leave one of them out")
        if fits and restarts is None:
            argv, num_procs = elastic(argv, num_procs)
        if dry:
            say(dry_run(argv, num_procs, launcher, purpose), sys.stdout)
            return
        if restarts is not None:
            code = supervise(argv, num_procs, launcher, restarts, fits)
        else:
            code = launch(argv, num_procs, launcher, purpose)
    except HybridError as exc:
        refuse(str(exc))
    raise typer.Exit(code)
