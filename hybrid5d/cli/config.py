"""`hybrid5d config schema` and `hybrid5d config show RUN.yaml`: what a YAML may say, and what one does say."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from hybrid5d.cli.options import Format, Overrides, Run, check_format, refuse
from hybrid5d.config.json_schema import json_schema
from hybrid5d.config.sources import Sourced, sourced
from hybrid5d.console import say
from hybrid5d.load import load_yaml
from hybrid5d.plan.outputs import json_text

app = typer.Typer(help="The YAML's keys: their JSON Schema, and a run's values with where each comes from.")


@app.command()
def schema() -> None:
    """JSON Schema of a run's YAML, for editors: `# yaml-language-server: $schema=FILE` in its first line."""
    sys.stdout.write(json_text(json_schema()))


@app.command()
def show(
    run: Run,
    overrides: Overrides = None,
    format_: Format = "text",
    all_: Annotated[bool, typer.Option("--all", help="keys at their default too")] = False,
) -> None:
    """Every value in force and where it comes from. Exit 2: refused, with every reason."""
    check_format(format_)
    loaded = load_yaml(run, overrides or [])
    if loaded.errors or loaded.config is None:
        refuse("\n".join(map(str, loaded.errors)))
    for notice in loaded.keys.notices:
        say(f"notice: {notice}")
    result = [s for s in sourced(loaded.config, loaded.keys) if all_ or s.source != "default"]
    if format_ == "json":
        sys.stdout.write(json_text([{"key": s.key, "value": s.value, "from": s.source} for s in result]))
    else:
        sys.stdout.write("".join(f"{line}\n" for line in _lines(result)))


def _lines(result: list[Sourced]) -> list[str]:
    """YAML flow values; the comment is the source. Columns as wide as most need."""
    texts = [f"{s.key}: {json.dumps(s.value, ensure_ascii=False)}" for s in result]
    width = min(max(map(len, texts), default=0), 64)
    return [f"{text:<{width}}  # {s.source}" for text, s in zip(texts, result)]
