"""`hybrid5d convert RUN.yaml`: an RLinf/Megatron YAML becomes a DeepSpeed config, with an account of every key."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hybrid5d.cli.options import Format, Overrides, WorldSize, check_format, refuse
from hybrid5d.config.classify import owner
from hybrid5d.config.schema import schema_keys
from hybrid5d.config.tree import get, nearest
from hybrid5d.errors import EXIT_REFUSED, ConfigError
from hybrid5d.plan.convert import Translation, translate
from hybrid5d.plan.outputs import REPORT, json_text, plan_files, write_files


def convert(
    run: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="RLinf/Megatron YAML, or one of ours")],
    overrides: Overrides = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of each of cluster.num_nodes nodes")] = 8,
    world_size: WorldSize = None,
    model: Annotated[str | None, typer.Option(help="Hugging Face folder to check the model rules against")] = None,
    out: Annotated[
        Path | None, typer.Option(help="write ds_config.json, accelerate.yaml, layout.json, resolved.yaml, report.json")
    ] = None,
    format_: Format = "text",
    explain: Annotated[str | None, typer.Option(metavar="KEY", help="tell one key's whole story")] = None,
) -> None:
    """Translate a YAML to DeepSpeed. Exit 0: translated; 2: refused, with every reason."""
    check_format(format_)
    result = translate(run, overrides or [], gpus_per_node=gpus_per_node, world_size=world_size, model=model)
    if explain is not None:
        _explain(result, explain, format_)
        return
    if out is not None:
        _write(result, out)
    if format_ == "json":
        sys.stdout.write(json_text(result.to_dict()))
    else:
        from hybrid5d.cli import render  # rich is not needed for JSON

        sys.stderr.write("".join(f"{error}\n" for error in result.errors))
        render.translation_text(render.console(), result)
    if result.errors:
        raise typer.Exit(EXIT_REFUSED)


def _write(result: Translation, out: Path) -> None:
    """A refused file leaves report.json only: there is nothing that could be run."""
    files = {REPORT: json_text(result.to_dict())}
    if result.plan is not None and not result.errors:
        files |= plan_files(result.plan, out)
    try:
        write_files(out, files)
    except OSError as exc:
        refuse(str(ConfigError("--out", str(out), f"cannot be written: {exc.strerror}", "choose another folder")))


def _explain(result: Translation, key: str, format_: str) -> None:
    story = key_story(result, key)
    if not story:
        known = [*schema_keys(), *(e["key"] for e in result.report)]
        near = nearest(key, known)
        refuse(
            f"--explain {key}: neither the file nor the schema has this key"
            + (f". Did you mean {near}?" if near else "")
        )
    if format_ == "json":
        sys.stdout.write(json_text(story))
        return
    from hybrid5d.cli import render

    for number, entry in enumerate(story):
        if number:
            sys.stdout.write("\n")
        render.explain_text(render.console(), [(name, render.show(value, 1000)) for name, value in entry.items()])


def key_story(result: Translation, key: str) -> list[dict[str, Any]]:
    """Everything known about a key, or about each key of a block."""
    story = []
    for line in result.report:
        path = line["key"]
        if path != key and not path.startswith(f"{key}."):
            continue
        results = schema_keys().get(owner(path) or "")
        entry: dict[str, Any] = {"key": path, "value": line["value"]}
        written = get(result.keys.raw, path)
        if written is not None and written != line["value"]:
            entry["written as"] = written
        entry |= {"disposition": line["disposition"], "target": line["target"], "why": line["why"]}
        if results is not None:
            unit = (results.json_schema_extra or {}).get("unit", "")
            entry |= {
                "meaning": results.description,
                "unit": unit,
                "default": results.get_default(call_default_factory=True),
            }
        name = path.rpartition(".")[2]
        refused = "; ".join(str(e) for e in result.errors if e.key == path)
        if refused:
            entry["refused"] = refused
        about = [n for n in result.notices if path in n or f"{name}=" in n or n.startswith(f"{name} ")]
        if about:
            entry["notice"] = "; ".join(about)
        story.append(entry)
    return story


def main() -> None:
    """`python -m hybrid5d.cli.convert`."""
    typer.run(convert)


if __name__ == "__main__":
    main()
