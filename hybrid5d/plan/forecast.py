"""What a plan amounts to before anything runs: groups across nodes, parameters per stage, the schedule's bubble. Pure.

Bytes, FLOPs and seconds are not forecast.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hybrid5d.plan.layout import AXES
from hybrid5d.plan.outputs import layout_summary
from hybrid5d.plan.pipeline import Schedule, timeline
from hybrid5d.plan.run import RunPlan
from hybrid5d.plan.tensors import elements_on

MAX_BUBBLE = 0.2  # a warning above
TOO_MANY = 1_000_000  # forwards of all stages that are still played through


@dataclass(frozen=True)
class AxisGroups:
    """The groups of one axis: how many ranks in each, how many groups, and how many of them span nodes."""

    size: int
    count: int
    across_nodes: int


@dataclass(frozen=True)
class StageForecast:
    """One pipeline stage. `parameters`: of one tp rank, vocabulary padding included; None: the model is unknown."""

    stage: int
    decoder_layers: int
    parameters: int | None


@dataclass(frozen=True)
class ScheduleForecast:
    """The step's program at unit costs F = B = W = 1, as `plan.pipeline.Timeline` defines each; by pp rank."""

    name: str
    chunks: int
    makespan_units: float
    bubble: float
    live_chunks: tuple[int, ...]
    idle_inside: tuple[float, ...]


@dataclass(frozen=True)
class Forecast:
    """Everything that `hybrid5d plan` says."""

    plan: RunPlan
    gpus_per_node: int
    groups: dict[str, AxisGroups]
    stages: tuple[StageForecast, ...]
    schedule: ScheduleForecast
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The object that `--format json` prints."""
        batch, config = asdict(self.plan.batch), self.plan.deepspeed
        names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        return {
            "layout": layout_summary(self.plan)
            | {"gpus_per_node": self.gpus_per_node, "groups": {axis: asdict(g) for axis, g in self.groups.items()}},
            "batch": batch | {"deepspeed": {name: config.get(name) for name in names}},
            "stages": [asdict(stage) for stage in self.stages],
            "schedule": asdict(self.schedule),
            "bubble": self.schedule.bubble,
            "warnings": list(self.warnings),
        }


def forecast(plan: RunPlan, gpus_per_node: int) -> Forecast:
    """Read everything off a plan; ranks fill nodes in order, `gpus_per_node` to each."""
    groups = {axis: _groups(plan, axis, gpus_per_node) for axis in reversed(AXES)}
    spec, tp = plan.model, plan.layout.tp
    stages = tuple(
        StageForecast(i, layers, None if spec is None else elements_on(spec, plan.stages, i, tp))
        for i, layers in enumerate(plan.stages)
    )
    schedule = _schedule(plan)
    return Forecast(plan, gpus_per_node, groups, stages, schedule, tuple(_warnings(plan, groups, schedule)))


def _groups(plan: RunPlan, axis: str, gpus_per_node: int) -> AxisGroups:
    found = plan.layout.groups(axis)
    across = sum(group[0] // gpus_per_node != group[-1] // gpus_per_node for group in found)
    return AxisGroups(len(found[0]), len(found), across)


def _schedule(plan: RunPlan) -> ScheduleForecast:
    """1F1B, which the engine runs.

    Its times at unit costs do not change with more micro-batches than fill the pipeline, other than by 3 units each, so
    a long step is played through in its short form.
    """
    pp, micro_batches = plan.layout.pp, plan.batch.gradient_accumulation_steps
    played = min(micro_batches, max(2 * pp, TOO_MANY // pp))
    times = timeline(Schedule("1f1b", pp), played)
    makespan = times.makespan + 3 * (micro_batches - played)
    return ScheduleForecast(
        "1f1b", 1, makespan, 1 - 3 * micro_batches / makespan, times.live, times.idle_inside
    )  # fmt: skip


def _warnings(plan: RunPlan, groups: dict[str, AxisGroups], schedule: ScheduleForecast) -> list[str]:
    found = []
    if groups["tp"].across_nodes:
        found.append(f"{groups['tp'].across_nodes} of {groups['tp'].count} tensor-parallel groups span nodes")
    if groups["cp"].across_nodes and plan.config.actor.model.cp_comm_type == "a2a":
        found.append(f"{groups['cp'].across_nodes} of {groups['cp'].count} Ulysses groups (cp, a2a) span nodes")
    empty = [i for i, layers in enumerate(plan.stages) if not layers]
    if empty:
        found.append(f"pipeline stages without a decoder layer: {', '.join(map(str, empty))}")
    if schedule.bubble > MAX_BUBBLE:
        steps, pp = plan.batch.gradient_accumulation_steps, plan.layout.pp
        found.append(f"bubble {schedule.bubble:.1%}: {steps} micro-batches on {pp} pipeline stages")
    if plan.batch.dynamic:
        found.append("dynamic batches: the number of micro-batches, and so the bubble, differs from step to step")
    if plan.model is None:
        found.append("parameters are not counted: actor.model.model_path names no folder with a config.json")
    return found
