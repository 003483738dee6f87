"""A run's trace as its ranks wrote it (`train.tracing`), read, checked and brought to one clock."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid5d.errors import HybridError
from hybrid5d.plan.layout import AXES, ParallelLayout
from hybrid5d.plan.pipeline import Schedule
from hybrid5d.train.run_folder import TRACE, TRACE_FORMAT, trace_file

PASSES = "FXBW"  # instructions of a schedule; the others are the step's own


@dataclass(frozen=True)
class Work:
    """One instruction of a rank, in nanoseconds from the start of the trace.

    Attributes:
        op: F, X, B, W of plan/pipeline.py; recv, send, sum (partial gradients), reduce, update.
    """

    op: str
    micro: int
    chunk: int
    start: int
    end: int


@dataclass(frozen=True)
class Call:
    """One operation of a process group on a rank.

    Attributes:
        axis: of the group: tp, cp, dp, pp, several joined by `+`, or world.
        bytes: what this rank gave (a receive: gets). peer: global rank of a message's other end, else -1.
        post: when it began, and when the call that began it returned. wait: when this rank waited for it, if it did.
    """

    op: str
    axis: str
    group: str
    ranks: tuple[int, ...]
    bytes: int
    peer: int
    post: tuple[int, int]
    wait: tuple[int, int] | None


@dataclass(frozen=True)
class RankStep:
    """What one rank did in one step."""

    start: int
    end: int
    work: tuple[Work, ...]
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Trace:
    """All ranks of a run.

    Attributes:
        steps: by the step's number, a `RankStep` a rank. tokens: by the step's number.
        decoder_layers: by stage.
        device: cpu or cuda; clock: host or device. clock_error: nanoseconds by which ranks of two hosts may be apart.
    """

    name: str
    layout: ParallelLayout
    schedule: Schedule
    decoder_layers: tuple[int, ...]
    device: str
    clock: str
    clock_error: int
    transport: str
    steps: Mapping[int, Sequence[RankStep]]
    tokens: Mapping[int, int]

    def stages_of(self, rank: int) -> list[int]:
        """Stages of a rank, by chunk."""
        return self.schedule.held(self.layout.coordinate(rank).pp)


def read_trace(folder: Path) -> Trace:
    """The trace in a run directory.

    Raises:
        HybridError: there is none; a rank's file is missing, not whole, or of another start of the run.
    """
    place = folder / TRACE
    first = _read(place, 0, f"{folder}: no trace in it. Fix: train with runner.trace_steps=[first,last], name that run")
    world = _layout(first).world_size
    files = [first, *(_read(place, r, f"{place}: the file of rank {r} of {world} is missing") for r in range(1, world))]
    for rank, file in enumerate(files):
        same = ("id", "layout", "schedule")
        if any(file[k] != first[k] for k in same) or file["rank"] != rank or _numbers(file) != _numbers(first):
            path = place / trace_file(rank)
            raise HybridError(f"{path}: of another start of the run than rank 0's. Fix: trace it again")
    try:
        return _trace(str(folder), files)
    except (KeyError, TypeError, ValueError, IndexError) as exc:
        raise HybridError(f"{place}: not as hybrid5d writes it ({type(exc).__name__}: {exc})") from None


def _read(place: Path, rank: int, missing: str) -> dict[str, Any]:
    path = place / trace_file(rank)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        version = found["format"]
        found["id"], found["layout"], found["schedule"], found["rank"], _numbers(found)
    except (FileNotFoundError, NotADirectoryError):
        raise HybridError(missing) from None
    except OSError as exc:
        raise HybridError(f"{path}: cannot be read: {exc.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise HybridError(f"{path}: not a whole trace. Fix: trace the run again") from None
    if version != TRACE_FORMAT:
        raise HybridError(f"{path}: format {version!r}, this version reads {TRACE_FORMAT}")
    return found  # type: ignore[no-any-return]


def _numbers(file: Mapping[str, Any]) -> list[int]:
    return [step["step"] for step in file["steps"]]


def _layout(file: Mapping[str, Any]) -> ParallelLayout:
    try:
        return ParallelLayout(**file["layout"])
    except (TypeError, ValueError) as exc:
        raise HybridError(f"{TRACE}/{trace_file(0)}: not as hybrid5d writes it ({exc})") from None


def axis_of(layout: ParallelLayout, ranks: Sequence[int]) -> str:
    """The axes on which the ranks of a group differ; `world` for several that hold everybody."""
    places = [layout.coordinate(rank) for rank in ranks]
    moving = [axis for axis in reversed(AXES) if len({getattr(place, axis) for place in places}) > 1]
    return "world" if len(moving) > 1 and len(ranks) == layout.world_size else "+".join(moving)


def _trace(name: str, files: Sequence[Mapping[str, Any]]) -> Trace:
    first, layout = files[0], _layout(files[0])
    origin = min(file["steps"][0]["start"] - file["offset_ns"] for file in files)
    by_rank = [[_rank_step(step, file, layout, origin + file["offset_ns"]) for step in file["steps"]] for file in files]
    kind = first["schedule"]
    return Trace(
        name=name,
        layout=layout,
        schedule=Schedule(kind["kind"], layout.pp, kind["chunks"], kind["wide"]),
        decoder_layers=tuple(first["decoder_layers"]),
        device=first["device"],
        clock=first["clock"],
        clock_error=max(file["offset_error_ns"] for file in files),
        transport=first["transport"],
        steps=dict(zip(_numbers(first), zip(*by_rank))),
        tokens={step["step"]: step["tokens"] for step in first["steps"]},
    )


def _rank_step(step: Mapping[str, Any], file: Mapping[str, Any], layout: ParallelLayout, zero: int) -> RankStep:
    """`zero`: the start of the trace on this rank's clock."""
    groups = [(g["name"], tuple(g["ranks"]), axis_of(layout, g["ranks"])) for g in file["groups"]]
    work = tuple(Work(op, micro, chunk, a - zero, b - zero) for op, micro, chunk, a, b in step["work"])
    calls = []
    for op, at, size, peer, a, b, c, d in step["calls"]:
        name, ranks, axis = groups[at]
        wait = None if c < 0 else (c - zero, d - zero)
        calls.append(Call(op, axis, name, ranks, size, peer, (a - zero, b - zero), wait))
    return RankStep(step["start"] - zero, step["end"] - zero, work, tuple(calls))
