"""Arguments that several verbs take, and their refusal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from hybrid5d.errors import EXIT_REFUSED

Run = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="the run: one of ours, or RLinf's on Megatron")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="key=value, +key=value, ~key; they win over the file")
]
WorldSize = Annotated[int | None, typer.Option(min=1, help="processes of the actor; overrides component_placement")]
Format = Annotated[str, typer.Option("--format", help="text or json")]
FORMATS = ("text", "json")


def refuse(line: str) -> NoReturn:
    """Print the reason and end with the code of refusals."""
    sys.stderr.write(f"{line}\n")
    raise typer.Exit(EXIT_REFUSED)


def check_format(format_: str, *more: str) -> None:
    """Refuse a format that is none of every verb's, nor of the `more` that this one knows."""
    if format_ not in (*FORMATS, *more):
        refuse(f"--format {format_!r}: known formats are {' and '.join((*FORMATS, *more))}")
