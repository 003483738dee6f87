"""Runs as curves on one HTML page: what metrics.jsonl and eval.jsonl of their folders hold. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from hybrid5d.errors import HybridError
from hybrid5d.html import document, table
from hybrid5d.train.run_folder import EVALS, METRICS, RunFolder, records

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 900, 260, 80, 24, 10
POINTS = 600  # of a curve; of more steps each interval shows its lowest and its highest value
FIRST = ("loss", "grad_norm", "lr", "tokens_per_second", "peak_memory_bytes")  # panels, in order; others follow
_NO_CURVE = ("step", "valid_tokens", "tokens", "step_time_s")
_DASHES = ("", "7 4", "2 3", "10 3 2 3")
Series = list[tuple[int, float]]


@dataclass(frozen=True)
class Run:
    """One run directory.

    Attributes:
        curves: by the metric's name, (step, value); a value that is not finite is NaN. `held_out_reward` is that of
            eval.jsonl, by RL step.
        evals: (step, held-out loss); NaN as above.
        exit_code: of result.json; None: the run did not come to its end.
    """

    name: str
    curves: Mapping[str, Series]
    evals: Series
    exit_code: int | None

    @property
    def steps(self) -> int:
        """The last step that left a line."""
        return max((s[-1][0] for s in self.curves.values() if s), default=0)


def read_run(folder: Path) -> Run:
    """What a run directory says.

    Raises:
        HybridError: there is no metrics.jsonl.
    """
    try:
        lines = records(folder / METRICS)
        evals = records(folder / EVALS) if (folder / EVALS).exists() else []
    except OSError as exc:
        name = Path(str(exc.filename)).name
        raise HybridError(f"{folder}: {name} cannot be read: {exc.strerror}. Fix: name a run directory") from None
    curves: dict[str, Series] = {}
    for record in lines:
        for name, value in record.items():
            if name not in _NO_CURVE and _is_number(value):
                curves.setdefault(name, []).append((record["step"], math.nan if value is None else float(value)))
    curves["held_out_reward"] = _held_out(evals, "reward")
    kept = {n: s for n, s in curves.items() if _finite(s) or n == "loss"}
    return Run(str(folder), kept, _held_out(evals, "loss"), RunFolder(folder).exit_code())


def _held_out(evals: Sequence[Mapping[str, Any]], name: str) -> Series:
    found = [(r["step"], r[name]) for r in evals if name in r and _is_number(r[name])]
    return [(step, math.nan if value is None else float(value)) for step, value in found]


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def page(runs: Sequence[Run]) -> str:
    """The whole document: a table, then one panel a metric with all runs in it."""
    names = dict.fromkeys(name for run in runs for name in run.curves)
    order = [n for n in FIRST if n in names] + sorted(n for n in names if n not in FIRST)
    title = f"Training of {runs[0].name}" if len(runs) == 1 else f"Training of {len(runs)} runs"
    return document(title, "\n".join([_summary(runs), _legend(runs), *(_panel(name, runs) for name in order)]))


def _summary(runs: Sequence[Run]) -> str:
    head = [
        "run",
        "steps",
        "first loss",
        "last loss",
        "lowest held-out loss",
        "tokens/s (median)",
        "peak memory",
        "end",
    ]
    caption = "Runs. Tokens/s leave out the first step, which warms up."
    return table(caption, head, [_row(run) for run in runs])


def _row(run: Run) -> list[str]:
    loss, speed = run.curves.get("loss", []), _finite(run.curves.get("tokens_per_second", []))[1:]
    memory, held = _finite(run.curves.get("peak_memory_bytes", [])), _finite(run.evals)
    return [
        run.name, str(run.steps), *(_value(loss[i][1]) if loss else "-" for i in (0, -1)),
        f"{min(v for _, v in held):.4f}" if held else "-", f"{median(v for _, v in speed):,.0f}" if speed else "-",
        f"{max(v for _, v in memory) / 2**30:.2f} GiB" if memory else "-",
        {None: "no result", 0: "reached", 3: "stopped as asked"}.get(run.exit_code, f"exit code {run.exit_code}"),
    ]  # fmt: skip


def _value(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "not finite"


def _legend(runs: Sequence[Run]) -> str:
    items = "".join(
        f'<li><svg viewBox="0 0 40 10" style="width: 40px; display: inline-block" aria-hidden="true">'
        f'<line x1="0" x2="40" y1="5" y2="5" {_stroke(i)}/></svg> {escape(run.name)}</li>'
        for i, run in enumerate(runs)
    )
    return f'<ul class="legend" aria-label="lines">{items}</ul>'


def _stroke(i: int) -> str:
    """Colour and dashes: eight colours alone do not differ for everybody."""
    return f'stroke="var(--c{i % 8})" stroke-width="1.8" stroke-dasharray="{_DASHES[i % len(_DASHES)]}" fill="none"'


def _panel(name: str, runs: Sequence[Run]) -> str:
    """A curve a run; circles are held-out values."""
    drawn = [(i, run, run.curves.get(name, [])) for i, run in enumerate(runs)]
    dots = {i: _finite(run.evals) for i, run, _ in drawn} if name == "loss" else {}
    finite = [p for _, _, s in drawn for p in _finite(s)] + [p for d in dots.values() for p in d]
    (x0, x1), (y0, y1) = _range(x for x, _ in finite), _range(y for _, y in finite)

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - 10),
            TOP + (y1 - y) / (y1 - y0) * (HEIGHT - TOP - BOTTOM),
        )

    parts = [_axes(x0, x1, y0, y1)]
    said = []
    for i, run, series in drawn:
        for piece in _pieces(thinned(series)):
            points = " ".join(f"{px:.1f},{py:.1f}" for px, py in (at(*p) for p in piece))
            parts.append(f'<polyline points="{points}" {_stroke(i)}><title>{escape(run.name)}</title></polyline>')
        for x, y in dots.get(i, []):
            px, py = at(x, y)
            title = escape(f"{run.name}: held-out loss {y:.4f} after step {x}")
            parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4" {_stroke(i)}><title>{title}</title></circle>')
        if values := _finite(series):
            said.append(f"{run.name}: {_short(values[0][1])} to {_short(values[-1][1])}")
        if bad := [x for x, y in series if not math.isfinite(y)]:
            said.append(f"{run.name}: not finite in {len(bad)} steps, the first {bad[0]}")
        if name == "loss" and (bad := [x for x, y in run.evals if not math.isfinite(y)]):
            said.append(f"{run.name}: held-out loss is no number after step {', '.join(map(str, bad))}")
    words = name.replace("_", " ")
    label = escape(f"{words} by step. {'; '.join(said)}")
    held = " Circles: held-out loss." if any(dots.values()) else ""
    return (
        f"<h2>{escape(words)}</h2><svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{label}'>{''.join(parts)}"
        f"</svg><p>{escape('; '.join(said))}.{held}</p>"
    )


def _axes(x0: float, x1: float, y0: float, y1: float) -> str:
    bottom, lines = HEIGHT - BOTTOM, []
    for k in range(5):
        y = TOP + k / 4 * (bottom - TOP)
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>')
        value = _short(y1 - k / 4 * (y1 - y0))
        lines.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value}</text>')
    for k in range(5):
        x = LEFT + k / 4 * (WIDTH - 10 - LEFT)
        anchor = "start" if k == 0 else "end" if k == 4 else "middle"
        step = round(x0 + k / 4 * (x1 - x0))
        lines.append(f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{step:,}</text>')
    return "".join(lines)


def thinned(series: Series) -> Series:
    """At most POINTS values: of each interval of steps the lowest and the highest, in order; NaN stays."""
    if len(series) <= POINTS:
        return series
    size, out = -(-2 * len(series) // POINTS), Series()
    for start in range(0, len(series), size):
        part = series[start : start + size]
        finite = _finite(part)
        ends = {min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])} if finite else set()
        gap = [p for p in part if not math.isfinite(p[1])][:1]
        out += sorted([*ends, *gap], key=lambda p: p[0])
    return out


def _pieces(series: Series) -> Iterable[Series]:
    """Runs of finite values: a line has a gap where a value is none."""
    piece: Series = []
    for point in [*series, (0, math.nan)]:
        if math.isfinite(point[1]):
            piece.append(point)
        elif piece:
            yield piece if len(piece) > 1 else piece * 2
            piece = []


def _finite(series: Iterable[tuple[int, float]]) -> Series:
    return [p for p in series if math.isfinite(p[1])]


def _range(values: Iterable[float]) -> tuple[float, float]:
    """Smallest and largest, a little apart where they are equal."""
    found = list(values) or [0.0]
    low, high = min(found), max(found)
    return (low, high) if high > low else (low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
