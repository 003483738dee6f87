"""`hybrid5d plan RUN.yaml`: what a layout amounts to, before anything runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hybrid5d.cli.options import Format, Overrides, Run, WorldSize, check_format, refuse
from hybrid5d.errors import ConfigErrors
from hybrid5d.plan.compare import compare, compare_text
from hybrid5d.plan.convert import translate
from hybrid5d.plan.explain import explain
from hybrid5d.plan.forecast import Forecast, forecast, with_measured
from hybrid5d.plan.hardware import Hardware, load_hardware
from hybrid5d.plan.outputs import json_text
from hybrid5d.plan.text import forecast_text


def plan(
    run: Run,
    overrides: Overrides = None,
    world_size: WorldSize = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="ranks fill nodes in order, so many to each")] = 8,
    gpu: Annotated[
        str, typer.Option(help="h100, h200, a100, cpu, or a YAML file like hardware.yaml's entries")
    ] = "h100",
    explain_: Annotated[str | None, typer.Option("--explain", metavar="KEY", help="a key of --format json")] = None,
    diff: Annotated[str | None, typer.Option(metavar="B.yaml", help="what changes with this run instead")] = None,
    measured: Annotated[float | None, typer.Option(min=1e-9, help="seconds of a measured step, to compare")] = None,
    format_: Format = "text",
) -> None:
    """Memory, traffic, FLOPs, bubble and seconds of a step, by stage and axis; no torch. Exit 2: refused."""
    check_format(format_)
    try:
        hardware = load_hardware(gpu)
    except ConfigErrors as exc:
        refuse("\n".join(map(str, exc.errors)))
    found = _forecast(str(run), overrides or [], world_size, gpus_per_node, hardware)
    if measured is not None:
        found = with_measured(found, measured)
    if explain_ is not None:
        try:
            sys.stdout.write(explain(explain_, found.to_dict()))
        except KeyError as exc:
            refuse(str(exc.args[0]))
    elif diff is not None:
        other = _forecast(diff, overrides or [], world_size, gpus_per_node, hardware)
        changes = compare(found.to_dict(), other.to_dict())
        sys.stdout.write(json_text({"changes": changes}) if format_ == "json" else compare_text(changes))
    else:
        sys.stdout.write(json_text(found.to_dict()) if format_ == "json" else forecast_text(found))


def _forecast(run: str, overrides: list[str], world: int | None, node: int, hardware: Hardware) -> Forecast:
    result = translate(run, overrides, gpus_per_node=node, world_size=world)
    if result.errors or result.plan is None:
        refuse("\n".join(map(str, result.errors)))
    return forecast(result.plan, node, hardware)


def main() -> None:
    """`python -m hybrid5d.cli.plan`."""
    typer.run(plan)


if __name__ == "__main__":
    main()
