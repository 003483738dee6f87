"""A trace as plain lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybrid5d.plan.text import size
from hybrid5d.trace.pieces import KINDS
from hybrid5d.trace.summary import Summary

MARKS = 5  # axes and operations that the terminal shows


def trace_text(found: Summary) -> str:
    """What `hybrid5d trace` prints of a run."""
    return "\n".join(_lines(found)) + "\n"


def headline(found: Summary) -> list[str]:
    """The facts that come first, on the terminal and on the page."""
    t, slow = found.trace, found.slowest
    axes = ", ".join(f"{axis} {getattr(t.layout, axis)}" for axis in ("tp", "cp", "dp", "pp"))
    ranks = f"rank{'s' if len(slow.ranks) > 1 else ''} {', '.join(map(str, slow.ranks))}"
    clocks = f", clocks of hosts aligned to {t.clock_error / 1e3:.0f} us" if t.clock_error else ""
    lines = [
        f"{t.layout.world_size} ranks ({axes}), {t.schedule.kind}, {found.micro_batches} micro-batches, {t.device}, "
        f"collectives through {t.transport}{clocks}",
        f"{_steps(list(t.steps))}: {found.step_seconds * 1e3:.1f} ms a step, {found.tokens_per_second:,.0f} tokens/s",
    ]
    if t.schedule.stages > 1:
        lines += [
            bubble_line(found),
            f"slowest stage: {slow.stage} ({ranks}; {slow.decoder_layers} decoder layers), {slow.seconds * 1e3:.1f} ms "
            f"of computing a step, {slow.over_mean:.2f} times the mean",
        ]
    return lines


def bubble_line(found: Summary) -> str:
    """Measured beside planned."""
    b = found.bubble
    return (
        f"bubble {b.measured:.1%} measured; the schedule's is {b.planned:.1%} with equal stages, "
        f"{b.at_measured_costs:.1%} with the measured mean of each pass"
    )


def _steps(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def time_rows(found: Summary) -> list[list[str]]:
    """Kind, milliseconds, share, tokens/s without it."""
    total = sum(found.seconds.values())
    return [
        [kind, f"{s * 1e3:.2f}", f"{s / total:.1%}", f"{found.without(kind):,.0f}"]
        for kind, s in ((kind, found.seconds[kind]) for kind in KINDS)
        if s > 0
    ]


def traffic_rows(found: Summary) -> list[list[str]]:
    """Axis, operation, calls, bytes, milliseconds of communication and of waiting; the longest first."""
    order = sorted(found.traffic, key=lambda c: -(c.communication + c.waiting))
    return [
        [c.axis, c.op.replace("_", "-"), f"{c.calls:g}", size(c.bytes), f"{c.communication * 1e3:.2f}",
         f"{c.waiting * 1e3:.2f}"]
        for c in order
    ]  # fmt: skip


TIME_HEAD = ("time of a rank", "ms a step", "share", "tokens/s without")
TRAFFIC_HEAD = ("axis", "operation", "calls", "bytes", "communication ms", "waiting ms")


def _lines(found: Summary) -> Iterator[str]:
    yield f"trace of {found.trace.name}"
    yield from (f"  {line}" for line in headline(found))
    yield from aligned(TIME_HEAD, time_rows(found))
    rows = traffic_rows(found)
    if rows:
        yield from aligned(TRAFFIC_HEAD, rows[:MARKS])
    if len(rows) > MARKS:
        yield f"  and {len(rows) - MARKS} more, in --format json and on the page"


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns under their heads: the first to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    for row in (head, *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        yield f"  {'  '.join(cells).rstrip()}"
