"""A rank's step cut into pieces that follow one another: computing, communicating, waiting for another rank.

A rank waits while it cannot go on because another one has not begun its part of an operation yet; from then on, and
where it is the last, it communicates. What it computes while an operation is under way is computing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hybrid5d.plan.pipeline import Instruction
from hybrid5d.trace.files import PASSES, Call, RankStep, Trace, Work

KINDS = ("forward", "backward", "weight gradients", "reduction", "optimizer", "communication", "waiting", "other")
_KIND_OF = {
    "F": "forward", "X": "backward", "B": "backward", "W": "weight gradients", "sum": "reduction",
    "reduce": "reduction", "update": "optimizer",
}  # fmt: skip
COMPUTING = ("forward", "backward", "weight gradients")


@dataclass(frozen=True)
class Piece:
    """One stretch of a rank's step.

    Attributes:
        name: of the instruction (F3) or the operation (all_reduce over tp); "" between them.
        work: index of the instruction that it lies in, -1 outside.
        axis: of the operation; "" where none.
    """

    start: int
    end: int
    kind: str
    name: str
    work: int = -1
    axis: str = ""

    @property
    def length(self) -> int:
        return self.end - self.start


def name_of(work: Work, chunks: int) -> str:
    """F3, X0b: as the schedules write instructions; without the letter where a rank has one chunk."""
    if work.op not in PASSES:
        return work.op
    name = str(Instruction(work.op, work.micro, work.chunk))  # type: ignore[arg-type]
    return name if chunks > 1 else name[:-1]


def pieces_of(trace: Trace, step: int) -> list[list[Piece]]:
    """The pieces of every rank in a step; those of a rank fill its step without gap or overlap."""
    ranks = trace.steps[step]
    ready = _ready(ranks)
    by_rank: list[dict[int, int]] = [{} for _ in ranks]
    for (k, i), at in ready.items():
        by_rank[k][i] = at
    chunks = trace.schedule.chunks
    return [_pieces(rank, found, chunks) for rank, found in zip(ranks, by_rank)]


def _ready(ranks: Sequence[RankStep]) -> dict[tuple[int, int], int]:
    """(rank, index of its call) -> when all that it waits for had begun; for calls whose other ends are found.

    The k-th operation of a group is the same one on all its ranks, the k-th message from one rank to another is the
    k-th that this one receives.
    """
    members: dict[tuple[object, ...], list[tuple[int, int, Call]]] = defaultdict(list)
    for rank, found in enumerate(ranks):
        count: dict[tuple[object, ...], int] = defaultdict(int)
        for i, call in enumerate(found.calls):
            ends = {"send": (rank, call.peer), "recv": (call.peer, rank)}.get(call.op, ())
            side = call.op if ends else ""
            key = (call.group, *ends)
            members[(*key, count[key, side])].append((rank, i, call))
            count[key, side] += 1
    ready: dict[tuple[int, int], int] = {}
    for entries in members.values():
        if entries[0][2].op in ("send", "recv"):
            sent = [call.post[0] for _, _, call in entries if call.op == "send"]
            ready |= {(rank, i): sent[0] for rank, i, call in entries if call.op == "recv" and sent}
        else:
            last = max(call.post[0] for _, _, call in entries)
            ready |= {(rank, i): last for rank, i, _ in entries}
    return ready


def _pieces(rank: RankStep, ready: Mapping[int, int], chunks: int) -> list[Piece]:
    blocked = sorted(_blocked(rank.calls, ready), key=lambda p: (p.start, p.end))
    found: list[Piece] = []
    at, queue = rank.start, iter(blocked)
    coming = next(queue, None)

    def fill(until: int, kind: str, name: str, work: int) -> None:
        """Up to `until`: what is blocked is that, the rest is `kind`."""
        nonlocal at, coming
        while coming is not None and coming.start < until:
            start, end = max(coming.start, at), min(max(coming.end, at), until)
            _add(found, Piece(at, start, kind, name, work))
            _add(found, Piece(start, end, coming.kind, coming.name, work, coming.axis))
            at = end
            if coming.end > until:
                break
            coming = next(queue, None)
        _add(found, Piece(at, until, kind, name, work))
        at = max(at, until)

    for i, work in enumerate(rank.work):
        fill(work.start, "other", "", -1)
        fill(work.end, _KIND_OF.get(work.op, "other"), name_of(work, chunks), i)
    fill(rank.end, "other", "", -1)
    return found


def _add(found: list[Piece], piece: Piece) -> None:
    if piece.length > 0:
        found.append(piece)


def _blocked(calls: Iterable[Call], ready: Mapping[int, int]) -> Iterable[Piece]:
    """When the rank could not go on for an operation."""
    for i, call in enumerate(calls):
        name = f"{call.op} over {call.axis}"
        if call.wait is not None:  # beginning it is work of this rank; it waits for others later
            yield Piece(*call.post, "communication", name, axis=call.axis)
        start, end = call.wait or call.post
        cut = min(max(ready.get(i, start), start), end)
        yield Piece(start, cut, "waiting", name, axis=call.axis)
        yield Piece(cut, end, "communication", name, axis=call.axis)
