"""`hybrid5d report RUN_DIR ...`: curves of one or several runs as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybrid5d.cli.options import refuse
from hybrid5d.console import say
from hybrid5d.errors import HybridError
from hybrid5d.files import write_whole
from hybrid5d.train.curves import page, read_run

Folders = Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="run directories; all in one picture")]
Out = Annotated[Path | None, typer.Option(metavar="FILE.html", help="default: report.html in the first run directory")]


def report(folders: Folders, out: Out = None) -> None:
    """Loss, held-out loss, norm, learning rate, tokens/s, memory and every other metric, by step."""
    target = out or folders[0] / "report.html"
    if target.suffix != ".html":
        refuse(f"--out {str(target)!r}: an HTML file is written. Fix: a name that ends with .html")
    try:
        runs = [read_run(folder) for folder in folders]
    except HybridError as exc:
        refuse(str(exc))
    if empty := [run.name for run in runs if not run.curves]:
        refuse(f"{empty[0]}: no step has left a number yet")
    try:
        write_whole(target, page(runs))
    except OSError as exc:
        refuse(f"--out {str(target)!r}: cannot be written: {exc.strerror}. Fix: choose another file")
    say(f"written: {target}")
