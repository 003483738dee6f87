"""`hybrid5d plan RUN.yaml`: what a layout amounts to, before anything runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hybrid5d.cli.options import Format, Overrides, Run, WorldSize, check_format, refuse
from hybrid5d.plan.convert import translate
from hybrid5d.plan.forecast import Forecast, forecast
from hybrid5d.plan.outputs import json_text


def plan(
    run: Run,
    overrides: Overrides = None,
    world_size: WorldSize = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="ranks fill nodes in order, so many to each")] = 8,
    format_: Format = "text",
) -> None:
    """Groups across nodes, batch, parameters per stage, bubble. Memory and time are not estimated. Exit 2: refused."""
    check_format(format_)
    result = translate(run, overrides or [], gpus_per_node=gpus_per_node, world_size=world_size)
    if result.errors or result.plan is None:
        refuse("\n".join(map(str, result.errors)))
    found = forecast(result.plan, gpus_per_node)
    sys.stdout.write(json_text(found.to_dict()) if format_ == "json" else _text(found))


def _text(found: Forecast) -> str:
    layout, batch, schedule = found.plan.layout, found.plan.batch, found.schedule
    ds = found.to_dict()["batch"]["deepspeed"]
    lines = [
        f"layout    {layout.world_size} ranks: tp {layout.tp}, cp {layout.cp}, dp {layout.dp}, pp {layout.pp}",
        *(
            f"  {axis}      {g.count} groups of {g.size}, {g.across_nodes} across nodes of {found.gpus_per_node}"
            for axis, g in found.groups.items()
        ),
        f"batch     {batch.global_batch_size} rows a step: {batch.gradient_accumulation_steps} micro-batches of "
        f"{batch.micro_batch_size} on each of {layout.dp} dp ranks",
        f"          DeepSpeed: {', '.join(f'{name} {value}' for name, value in ds.items())}",
        *(
            f"stage {s.stage:<3} {s.decoder_layers} decoder layers, "
            f"{'unknown' if s.parameters is None else f'{s.parameters:,}'} parameters a rank, "
            f"{schedule.live_chunks[s.stage]} micro-batches alive"
            for s in found.stages
        ),
        f"schedule  {schedule.name}: {schedule.makespan_units:g} units, bubble {schedule.bubble:.1%}",
        *(f"warning   {text}" for text in found.warnings),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """`python -m hybrid5d.cli.plan`."""
    typer.run(plan)


if __name__ == "__main__":
    main()
