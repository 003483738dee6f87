"""Traces as one HTML page: a row a rank, runs below one another at one scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from hybrid5d.html import document, table
from hybrid5d.trace.pieces import KINDS, Piece, pieces_of
from hybrid5d.trace.summary import Summary
from hybrid5d.trace.text import TIME_HEAD, TRAFFIC_HEAD, headline, time_rows, traffic_rows

WIDTH, LEFT, ROW, BOTTOM = 1100, 70, 26, 22
TITLED = 1.5  # pixels from which a piece is a shape of its own, with a title
LETTERS = 18  # pixels that hold an instruction's name
LISTED = 1500  # instructions that the page lists
_FILL = {
    "forward": "var(--c0)", "backward": "var(--c1)", "weight gradients": "var(--c2)", "reduction": "var(--c3)",
    "optimizer": "var(--c4)", "communication": "var(--c6)", "waiting": "var(--line)",
}  # fmt: skip  # the rest is the page itself


def page(runs: Sequence[Summary]) -> str:
    """The whole document."""
    name = runs[0].trace.name if len(runs) == 1 else f"{len(runs)} runs"
    longest = max(_span(run) for run in runs)
    return document(f"Trace of {name}", "\n".join([_legend(), *(_run(run, longest, len(runs) > 1) for run in runs)]))


def _span(run: Summary) -> int:
    ranks = run.trace.steps[run.typical]
    return max(r.end for r in ranks) - min(r.start for r in ranks)


def _legend() -> str:
    items = "".join(f'<li><span style="background: {fill}"></span>{escape(kind)}</li>' for kind, fill in _FILL.items())
    return (
        f'<ul class="legend" aria-label="colours">{items}<li><span></span>other</li></ul>'
        "<p>A rank waits while another one has not begun its part of an operation; then it communicates. F, X, B, W: "
        "forward, whole backward, gradient of the input, gradients of the weights; then micro-batch and run of layers."
        "</p>"
    )


def _run(run: Summary, longest: int, named: bool) -> str:
    facts = "".join(f"<li>{escape(line)}</li>" for line in headline(run))
    parts = [f"<h2>{escape(run.trace.name)}</h2>" if named else "", f"<ul>{facts}</ul>", _picture(run, longest)]
    parts.append(table("Where the time of a step went: mean over ranks and steps", TIME_HEAD, time_rows(run)))
    if run.trace.schedule.stages > 1:
        head = ["stage", "ranks", "decoder layers", "computing ms a step", "of the mean"]
        rows = [
            [str(s.stage), ", ".join(map(str, s.ranks)), str(s.decoder_layers), f"{s.seconds * 1e3:.2f}",
             f"{s.over_mean:.2f}"]
            for s in run.stages
        ]  # fmt: skip
        parts.append(table("Stages: what they compute, without communication and waiting", head, rows))
    shown = [kind for kind in KINDS if run.seconds[kind] > 0]
    rows = [[str(r), *(f"{found[kind] * 1e3:.2f}" for kind in shown)] for r, found in enumerate(run.by_rank)]
    parts.append(table("Milliseconds of a step by rank", ["rank", *shown], rows))
    if run.traffic:
        caption = "Operations of a rank in a step, by axis; bytes are those that it gives, of a receive those it gets"
        parts.append(table(caption, TRAFFIC_HEAD, traffic_rows(run)))
    parts.append(_listing(run))
    return "\n".join(parts)


def _picture(run: Summary, longest: int) -> str:
    ranks = run.trace.steps[run.typical]
    zero, scale = min(r.start for r in ranks), (WIDTH - LEFT - 10) / longest
    height = len(ranks) * ROW + BOTTOM
    parts = list(_axis(longest, height))
    for rank, pieces in enumerate(pieces_of(run.trace, run.typical)):
        y = rank * ROW
        parts.append(f'<text x="0" y="{y + ROW - 9}">rank {rank}</text>')
        parts += _row(pieces, rank, zero, scale, y)
    told = f"Step {run.typical}, {_span(run) / 1e6:.1f} ms: a row a rank. The same numbers are in the tables below."
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(told)}">'
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(told)}">{"".join(parts)}</svg></div>'
        f"<p>{escape(told)}</p>"
    )


def _axis(longest: int, height: int) -> Iterator[str]:
    for k in range(6):
        x = LEFT + k / 5 * (WIDTH - LEFT - 10)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - BOTTOM + 4}" stroke="var(--line)"/>'
        anchor = "end" if k == 5 else "middle"
        yield f'<text x="{x:.1f}" y="{height - 5}" text-anchor="{anchor}">{longest * k / 5 / 1e6:.1f} ms</text>'


def _row(pieces: Sequence[Piece], rank: int, zero: int, scale: float, y: float) -> Iterator[str]:
    """Wide pieces with a title each; of the narrow ones one shape a colour."""
    small: dict[str, list[str]] = {}
    for piece in pieces:
        fill = _FILL.get(piece.kind)
        x, width = LEFT + (piece.start - zero) * scale, piece.length * scale
        if fill is None:
            continue
        if width < TITLED:
            small.setdefault(fill, []).append(f"M{x:.2f} {y + 2}h{width:.2f}v{ROW - 4}h{-width:.2f}z")
            continue
        told = f"rank {rank}: {piece.name}, {piece.kind}, {piece.length / 1e6:.3f} ms from {piece.start / 1e6:.3f} ms"
        yield (
            f'<rect x="{x:.2f}" y="{y + 2}" width="{width:.2f}" height="{ROW - 4}" fill="{fill}">'
            f"<title>{escape(told)}</title></rect>"
        )
        if width > LETTERS and not piece.axis and piece.kind != "other":
            yield f'<text x="{x + 3:.2f}" y="{y + ROW - 9}" class="in">{escape(piece.name)}</text>'
    for fill, shapes in small.items():
        yield f'<path d="{"".join(shapes)}" fill="{fill}"/>'


def _listing(run: Summary) -> str:
    """The instructions of the step that is drawn, for those who do not see the picture."""
    ranks = run.trace.steps[run.typical]
    if sum(len(r.work) for r in ranks) > LISTED:
        return "<p>Too many instructions to list here: trace.json holds all of them.</p>"
    rows = []
    for rank, (found, pieces) in enumerate(zip(ranks, pieces_of(run.trace, run.typical))):
        inside: dict[tuple[int, str], int] = {}
        for p in pieces:
            inside[p.work, p.kind] = inside.get((p.work, p.kind), 0) + p.length
        names = {p.work: p.name for p in pieces if not p.axis}
        for i, work in enumerate(found.work):
            parts = (inside.get((i, kind), 0) for kind in ("communication", "waiting"))
            numbers = (work.start, work.end - work.start, *parts)
            rows.append([str(rank), names.get(i, work.op), *(f"{n / 1e6:.3f}" for n in numbers)])
    head = ["rank", "instruction", "from ms", "ms", "of it communication", "of it waiting"]
    return (
        f"<details><summary>Instructions of step {run.typical}</summary>"
        f"{table(f'Instructions of step {run.typical}, in the order in which they ran', head, rows)}</details>"
    )
