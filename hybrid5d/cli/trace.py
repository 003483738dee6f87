"""`hybrid5d trace RUN_DIR ...`: what every rank did in the steps of runner.trace_steps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hybrid5d.cli.options import Format, check_format, refuse
from hybrid5d.errors import HybridError
from hybrid5d.files import write_whole

Folders = Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="run directories; all on one page")]
Out = Annotated[Path | None, typer.Option(metavar="FILE.html", help="default: trace.html in the first RUN_DIR/trace")]


def trace(folders: Folders, out: Out = None, format_: Format = "text") -> None:
    """Time, bubble and slowest stage; writes trace.html, and trace.json for Perfetto into each RUN_DIR/trace."""
    check_format(format_)
    from hybrid5d.plan.outputs import json_text
    from hybrid5d.trace.chrome import chrome_json
    from hybrid5d.trace.files import read_trace
    from hybrid5d.trace.page import page
    from hybrid5d.trace.summary import summary
    from hybrid5d.trace.text import trace_text
    from hybrid5d.train.run_folder import TRACE

    target = out or folders[0] / TRACE / "trace.html"
    if target.suffix != ".html":
        refuse(f"--out {str(target)!r}: an HTML file is written. Fix: a name that ends with .html")
    try:
        runs = [summary(read_trace(folder)) for folder in folders]
    except HybridError as exc:
        refuse(str(exc))
    texts = {folder / TRACE / "trace.json": chrome_json(run.trace) for folder, run in zip(folders, runs)}
    try:
        for path, text in {target: page(runs), **texts}.items():
            write_whole(path, text)
    except OSError as exc:
        refuse(f"{path}: cannot be written: {exc.strerror}. Fix: choose another folder")
    if format_ == "json":
        sys.stdout.write(json_text([run.to_dict() for run in runs]))
        return
    for run in runs:
        sys.stdout.write(trace_text(run))
    sys.stdout.write(f"written: {target}; for Perfetto: {', '.join(map(str, texts))}\n")
