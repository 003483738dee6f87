"""`hybrid5d check RUN.yaml`: prove the layout of a run before it costs anything."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybrid5d.check.cuts import Degrees, parts, project
from hybrid5d.check.shrink import Small, cut_of, differences, refusals, shrink
from hybrid5d.cli.options import Format, Overrides, Run, WorldSize, check_format, refuse
from hybrid5d.console import say
from hybrid5d.errors import EXIT_FAILED, ConfigErrors
from hybrid5d.plan.convert import translate
from hybrid5d.plan.outputs import json_text
from hybrid5d.plan.run import RunPlan

if TYPE_CHECKING:
    from hybrid5d.check.verify import Verdict

Ranks = Annotated[int, typer.Option(min=2, help="the most processes that are started at a time")]


def check(
    run: Run, overrides: Overrides = None, ranks: Ranks = 16, world_size: WorldSize = None, format_: Format = "text"
) -> None:
    """Train a small model in the run's layout and in one process; compare. Exit 0: equal, 1: different, 2: refused."""
    check_format(format_)
    result = translate(run, overrides or [], world_size=world_size)
    if result.errors or result.plan is None:
        refuse("\n".join(map(str, result.errors)))
    plan = result.plan
    errors = [str(e) for e in refusals(plan)]
    if find_spec("transformers") is None:
        errors.append(
            "check compares with Hugging Face transformers, which is not installed. Fix: pip install hybrid5d[hf]"
        )
    if errors:
        refuse("\n".join(errors))
    for notice in result.notices:
        say(f"notice: {notice}")
    own = cut_of(plan)
    small = shrink(plan, own if own.world <= ranks else project(own))
    try:
        cuts = parts(small.cut, ranks)
    except ValueError as exc:
        refuse(f"--ranks {ranks}: {exc} even at its smallest. Fix: a larger --ranks")
    if format_ == "text":
        say("\n".join(_introduction(plan, small, cuts)), sys.stdout)
    os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed looks for another, and says on standard output what it took
    from hybrid5d.check.verify import verify  # torch, DeepSpeed and transformers: seconds

    try:
        verdict = verify(small, cuts, progress=lambda line: say(f"... {line}"))
    except ConfigErrors as exc:
        refuse("\n".join(f"the small run: {e}" for e in exc.errors))
    _show(verdict, plan, small, format_)
    raise typer.Exit(0 if verdict.equal else EXIT_FAILED)


def _introduction(plan: RunPlan, small: Small, cuts: Sequence[Degrees]) -> list[str]:
    own = cut_of(plan)
    head = f"{own} ({own.world} process{'es' if own.world > 1 else ''}), {plan.precision.dtype}, ZeRO {plan.zero_stage}"
    lines = [head, "What is trained here differs from the run in:"]
    if small.cut != own:
        lines.append(f"  - degrees: {small.cut}")
    if cuts[0] != small.cut:
        lines.append(f"  - not all axes at once, but: {'; '.join(map(str, cuts))}")
    return [*lines, *(f"  - {line}" for line in differences(small))]


def _show(verdict: Verdict, plan: RunPlan, small: Small, format_: str) -> None:
    from hybrid5d.check.report import lines, trial_facts

    guilty = verdict.guilty
    trials = [trial_facts(t.cut, t.comparison, t.faults) for t in verdict.trials]
    smallest = None if guilty is None else trial_facts(guilty.cut, guilty.comparison, guilty.faults)
    if format_ == "json":
        facts: dict[str, Any] = {"equal": verdict.equal, "layout": str(cut_of(plan)), "axes": list(verdict.axes)}
        facts |= {"tensor": verdict.tensor, "differences": list(differences(small)), "data": verdict.data}
        sys.stdout.write(json_text({**facts, "trials": trials, "smallest": smallest}))
        return
    text = [verdict.data, *(line for facts in trials for line in lines(facts))]
    if smallest is not None and guilty is not None:
        if guilty not in verdict.trials:
            text += ["The smallest layout that differs:", *lines(smallest)]
        where = " x ".join(verdict.axes) if verdict.axes else "no axis: one rank differs too"
        text += [*(f"  {fault}" for fault in guilty.faults), f"DIFFERENT: {where}"]
        text += [f"Look first at {verdict.tensor}"] if verdict.tensor else []
        if not verdict.axes and plan.precision.dtype != "fp32":
            text.append("It may be rounding: check once more with actor.model.precision=fp32")
    else:
        text.append("EQUAL: the layout computes what one process computes")
    sys.stdout.write("\n".join(text) + "\n")
