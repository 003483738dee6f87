"""`hybrid5d plan RUN.yaml`: what a layout amounts to, before anything runs."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from hybrid5d.cli.options import Overrides, Run, WorldSize, check_format, refuse
from hybrid5d.errors import ConfigErrors
from hybrid5d.files import write_whole
from hybrid5d.plan.compare import compare, compare_text
from hybrid5d.plan.convert import translate
from hybrid5d.plan.explain import explain
from hybrid5d.plan.forecast import Forecast, forecast, with_measured
from hybrid5d.plan.hardware import Hardware, load_hardware
from hybrid5d.plan.job import job_of
from hybrid5d.plan.outputs import json_text, resolved_text
from hybrid5d.plan.page import page
from hybrid5d.plan.search import changed, search, with_reasons
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
    search_: Annotated[bool, typer.Option("--search", help="all layouts on --world-size ranks, best first")] = False,
    write: Annotated[
        Path | None, typer.Option(metavar="BEST.yaml", help="with --search: the run with the best")
    ] = None,
    measured: Annotated[float | None, typer.Option(min=1e-9, help="seconds of a measured step, to compare")] = None,
    format_: Annotated[str, typer.Option("--format", help="text, json or html")] = "text",
) -> None:
    """Memory, traffic, FLOPs, bubble and seconds of a step, by stage and axis; no torch. Exit 2: refused."""
    check_format(format_, "html")
    _check_words(search_ or write is not None, diff is not None, explain_ is not None, measured is not None, format_)
    try:
        hardware = load_hardware(gpu)
        if search_ or write is not None:
            _search(str(run), overrides or [], world_size, gpus_per_node, hardware, write, format_)
            return
        result = _forecast(str(run), overrides or [], world_size, gpus_per_node, hardware)
        other = None if diff is None else _forecast(diff, overrides or [], world_size, gpus_per_node, hardware)
    except ConfigErrors as exc:
        refuse("\n".join(map(str, exc.errors)))
    if measured is not None:
        result = with_measured(result, measured)
    if explain_ is not None:
        try:
            sys.stdout.write(explain(explain_, result.to_dict()))
        except KeyError as exc:
            refuse(str(exc.args[0]))
    elif other is not None:
        changes = compare(result.to_dict(), other.to_dict())
        sys.stdout.write(json_text({"changes": changes}) if format_ == "json" else compare_text(changes))
    elif format_ == "html":
        sys.stdout.write(page(result))
    else:
        sys.stdout.write(json_text(result.to_dict()) if format_ == "json" else forecast_text(result))


def _check_words(search_: bool, diff: bool, explain_: bool, measured: bool, format_: str) -> None:
    """Refuse options that would be read past beside one another."""
    given = [name for name, here in (("--search", search_), ("--diff", diff), ("--explain", explain_)) if here]
    if format_ == "html" and given:
        refuse("--format html: a page shows one forecast; --search, --diff and --explain write text or json")
    if len(given) > 1:
        refuse(f"{' and '.join(given)}: each is an answer of its own. Fix: give one of them")
    if measured and search_:
        refuse("--measured: a search has no one step to compare with. Fix: leave it out, or plan one layout")
    if measured and diff:
        refuse("--measured: one step's time says nothing of the other run. Fix: leave out --measured or --diff")
    if explain_ and format_ != "text":
        refuse(f"--format {format_}: --explain writes text. Fix: leave one of them out")


def _forecast(run: str, overrides: list[str], world: int | None, node: int, hardware: Hardware) -> Forecast:
    result = translate(run, overrides, gpus_per_node=node, world_size=world)
    if result.errors or result.plan is None:
        refuse("\n".join(map(str, result.errors)))
    return forecast(result.plan, node, hardware)


ALONE = (
    "actor.micro_batch_size=1",
    *(
        f"actor.model.{name}"
        for name in (
            "tensor_model_parallel_size=1", "pipeline_model_parallel_size=1", "context_parallel_size=1",
            "sequence_parallel=false", "decoder_first_pipeline_num_layers=null",
            "decoder_last_pipeline_num_layers=null", "hierarchical_context_parallel_sizes=null",
            "pipeline_schedule=null", "virtual_pipeline_model_parallel_size=null", "pipeline_warmup=plain",
            "pipeline_partition=uniform",
        )
    ),
)  # fmt: skip


def _search(
    run: str, overrides: list[str], world: int | None, node: int, hardware: Hardware, write: Path | None, format_: str
) -> None:
    """The run on one rank is the start: its degrees, micro-batch and world may be what does not work."""
    if world is None:
        refuse("--search needs --world-size N")
    if write is not None and write.exists():
        refuse(f"--write {str(write)!r}: the file exists; name another")
    if write is not None and not write.parent.is_dir():
        refuse(f"--write {str(write)!r}: {str(write.parent)!r} is no folder. Fix: make it, or name another file")
    result = translate(run, [*overrides, *ALONE], gpus_per_node=node, world_size=1)
    if result.errors or result.plan is None:
        refuse("\n".join(map(str, result.errors)))
    config, job = result.plan.config, job_of(result.plan, node)
    rows = config.actor.global_batch_size
    if config.is_rl or rows is None or job is None:
        missing = (
            "an RL run's batch is not searched" if config.is_rl else "actor.global_batch_size and the sizes are needed"
        )
        refuse(f"--search: {missing}")
    results = with_reasons(config, search(replace(job, node=node), world, rows, hardware), world, hardware)
    sys.stdout.write(json_text(results.to_dict()) if format_ == "json" else results.text())
    if not results.best:
        refuse(f"--search: no layout of {world} ranks fits {hardware.name}")
    if write is not None:
        write_whole(write, resolved_text(changed(config, results.best[0].keys())))


def main() -> None:
    """`python -m hybrid5d.cli.plan`."""
    typer.run(plan)


if __name__ == "__main__":
    main()
