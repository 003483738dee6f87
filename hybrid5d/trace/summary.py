"""A trace in numbers: where the time of a step went, the bubble, the slowest stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from hybrid5d.plan.job import played
from hybrid5d.plan.pipeline import timeline
from hybrid5d.trace.files import PASSES, RankStep, Trace
from hybrid5d.trace.pieces import COMPUTING, KINDS, Piece, pieces_of


@dataclass(frozen=True)
class Bubble:
    """Part of ranks x makespan in which no pass of the pipeline runs.

    Attributes:
        measured: a pass includes what it communicates; from the first pass of a pipeline's ranks to the last one.
        planned: of the schedule with equal stages, F = B = W, messages free.
        at_measured_costs: the same with each pass as long as the mean of its kind in this trace.
    """

    measured: float
    planned: float
    at_measured_costs: float


@dataclass(frozen=True)
class Stage:
    """One stage of the pipeline: seconds of a step that its ranks compute, without communication and waiting."""

    stage: int
    ranks: tuple[int, ...]
    decoder_layers: int
    seconds: float
    over_mean: float


@dataclass(frozen=True)
class Traffic:
    """Operations over an axis, of one rank and step (mean)."""

    axis: str
    op: str
    calls: float
    bytes: float
    communication: float
    waiting: float


@dataclass(frozen=True)
class Summary:
    """All of it. Seconds are means over ranks and steps.

    Attributes:
        step_seconds: of the slowest rank, mean over the steps.
        typical: the step whose time is the median.
        seconds: by kind of `pieces`. by_rank: the same, a rank.
    """

    trace: Trace
    micro_batches: int
    step_seconds: float
    tokens_per_second: float
    typical: int
    bubble: Bubble
    seconds: dict[str, float]
    by_rank: tuple[dict[str, float], ...]
    stages: tuple[Stage, ...]
    traffic: tuple[Traffic, ...]

    @property
    def slowest(self) -> Stage:
        return max(self.stages, key=lambda s: s.seconds)

    def without(self, kind: str) -> float:
        """Tokens/s of a step that is shorter by the mean time of a kind: what is to be had there at most."""
        left = self.step_seconds - self.seconds[kind]
        return self.tokens_per_second * self.step_seconds / left if left > 0 else float("inf")

    def to_dict(self) -> dict[str, Any]:
        """What `--format json` prints; keys are stable."""
        t = self.trace
        return {
            "run": t.name,
            "layout": asdict(t.layout),
            "schedule": {"name": t.schedule.kind, "chunks": t.schedule.chunks, "micro_batches": self.micro_batches},
            "device": t.device,
            "clock": {"kind": t.clock, "error_seconds": t.clock_error / 1e9},
            "steps": list(t.steps),
            "typical_step": self.typical,
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "bubble": asdict(self.bubble),
            "seconds": self.seconds,
            "ranks": [{"rank": r, "seconds": found} for r, found in enumerate(self.by_rank)],
            "stages": [asdict(s) for s in self.stages],
            "slowest_stage": self.slowest.stage,
            "collectives": [asdict(c) for c in self.traffic],
        }


def summary(trace: Trace) -> Summary:
    """Numbers of a trace."""
    pieces = {step: pieces_of(trace, step) for step in trace.steps}
    spans = {step: max(r.end - r.start for r in ranks) / 1e9 for step, ranks in trace.steps.items()}
    world = trace.layout.world_size
    by_rank = tuple(_kinds([p for found in pieces.values() for p in found[r]], len(pieces)) for r in range(world))
    middle = sorted(spans, key=lambda step: spans[step])[(len(spans) - 1) // 2]
    mean = fmean(spans.values())
    return Summary(
        trace=trace,
        micro_batches=_micro_batches(next(iter(trace.steps.values()))[0]),
        step_seconds=mean,
        tokens_per_second=sum(trace.tokens.values()) / sum(spans.values()),
        typical=middle,
        bubble=_bubble(trace),
        seconds={kind: fmean(found[kind] for found in by_rank) for kind in KINDS},
        by_rank=by_rank,
        stages=_stages(trace, pieces),
        traffic=_traffic(trace, pieces),
    )


def _kinds(pieces: Sequence[Piece], steps: int) -> dict[str, float]:
    found = dict.fromkeys(KINDS, 0.0)
    for piece in pieces:
        found[piece.kind] += piece.length / 1e9 / steps
    return found


def _micro_batches(rank: RankStep) -> int:
    return sum(work.op == "F" and work.chunk == 0 for work in rank.work)


def _bubble(trace: Trace) -> Bubble:
    layout, schedule = trace.layout, trace.schedule
    busy = room = 0.0
    lengths: dict[str, list[int]] = defaultdict(list)
    planned, measured_costs = [], []
    for ranks in trace.steps.values():
        for group in layout.groups("pp"):
            passes = [[w for w in ranks[r].work if w.op in PASSES] for r in group]
            window = max(w.end for p in passes for w in p) - min(w.start for p in passes for w in p)
            busy += sum(w.end - w.start for p in passes for w in p)
            room += window * len(group)
        for rank in ranks:
            for work in rank.work:
                if work.op in PASSES:
                    lengths[work.op].append(work.end - work.start)
    costs = {op: fmean(found) for op, found in lengths.items()}
    for m in {_micro_batches(ranks[0]) for ranks in trace.steps.values()}:
        planned.append(played(schedule, m).bubble)
        measured_costs.append(timeline(schedule, m, costs).bubble)
    return Bubble(1 - busy / room, fmean(planned), fmean(measured_costs))


def _stages(trace: Trace, pieces: dict[int, list[list[Piece]]]) -> tuple[Stage, ...]:
    seconds: dict[int, float] = defaultdict(float)
    holders: dict[int, list[int]] = defaultdict(list)
    for rank in range(trace.layout.world_size):
        held = trace.stages_of(rank)
        for stage in held:
            holders[stage].append(rank)
        for step, found in pieces.items():
            work = trace.steps[step][rank].work
            for piece in found[rank]:
                if piece.kind in COMPUTING:
                    seconds[held[work[piece.work].chunk]] += piece.length / 1e9 / len(pieces)
    each = {stage: seconds[stage] / len(ranks) for stage, ranks in sorted(holders.items())}
    mean = fmean(each.values()) or 1.0
    return tuple(Stage(s, tuple(holders[s]), trace.decoder_layers[s], found, found / mean) for s, found in each.items())


def _traffic(trace: Trace, pieces: dict[int, list[list[Piece]]]) -> tuple[Traffic, ...]:
    share = 1 / (trace.layout.world_size * len(pieces))
    count: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    for ranks in trace.steps.values():
        for call in (c for rank in ranks for c in rank.calls):
            entry = count[call.axis, call.op]
            entry[0] += share
            entry[1] += call.bytes * share
    for piece in (p for found in pieces.values() for rank in found for p in rank if p.axis):
        entry = count[piece.axis, piece.name.split(" over ")[0]]
        entry[2 if piece.kind == "communication" else 3] += piece.length / 1e9 * share
    return tuple(Traffic(axis, op, *numbers) for (axis, op), numbers in sorted(count.items()))
