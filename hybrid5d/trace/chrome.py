"""A trace as JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open: a process a rank, all steps.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from hybrid5d.trace.files import Trace
from hybrid5d.trace.pieces import name_of, pieces_of

_PROGRAM, _FLIGHT = 0, 1


def chrome_json(trace: Trace) -> str:
    """The file's text."""
    return json.dumps({"traceEvents": list(_events(trace)), "displayTimeUnit": "ms"}, separators=(",", ":")) + "\n"


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    for rank in range(trace.layout.world_size):
        at = trace.layout.coordinate(rank)
        name = f"rank {rank} (pp {at.pp}, dp {at.dp}, cp {at.cp}, tp {at.tp})"
        yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
        for tid, label in ((_PROGRAM, "program"), (_FLIGHT, "under way")):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": label}}
    for step, ranks in trace.steps.items():
        for rank, (found, pieces) in enumerate(zip(ranks, pieces_of(trace, step))):
            base = {"pid": rank, "tid": _PROGRAM}
            yield {**base, **_span(f"step {step}", "step", found.start, found.end)}
            for work in found.work:
                args = {"args": {"stage": trace.stages_of(rank)[work.chunk], "micro_batch": work.micro}}
                yield {
                    **base,
                    **_span(name_of(work, trace.schedule.chunks), "instruction", work.start, work.end),
                    **args,
                }
            for piece in pieces:
                if piece.axis:
                    yield {**base, **_span(f"{piece.kind}: {piece.name}", piece.kind, piece.start, piece.end)}
        yield from _operations(trace, step)


def _operations(trace: Trace, step: int) -> Iterator[dict[str, Any]]:
    """From the begin of each operation to the end of its wait, and arrows from sends to receives."""
    sent: dict[tuple[Any, ...], int] = defaultdict(int)
    for rank, found in enumerate(trace.steps[step]):
        for i, call in enumerate(found.calls):
            end = (call.wait or call.post)[1]
            base = {"pid": rank, "tid": _FLIGHT, "cat": call.axis, "name": f"{call.op} over {call.axis}"}
            ident = f"{step}.{rank}.{i}"
            yield {**base, "ph": "b", "id": ident, "ts": call.post[0] / 1e3, "args": {"bytes": call.bytes}}
            yield {**base, "ph": "e", "id": ident, "ts": end / 1e3}
            if call.peer >= 0:
                ends = (rank, call.peer) if call.op == "send" else (call.peer, rank)
                key = (call.op, call.group, *ends)
                flow = f"{step}.{call.group}.{ends[0]}.{ends[1]}.{sent[key]}"
                sent[key] += 1
                arrow = {"pid": rank, "tid": _PROGRAM, "cat": "message", "name": "message", "id": flow}
                if call.op == "send":
                    yield {**arrow, "ph": "s", "ts": call.post[0] / 1e3}
                else:
                    yield {**arrow, "ph": "f", "bp": "e", "ts": end / 1e3}


def _span(name: str, kind: str, start: int, end: int) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": kind, "ts": start / 1e3, "dur": (end - start) / 1e3}
