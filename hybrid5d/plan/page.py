"""A forecast as one HTML page: self-contained, no script, light and dark, read by keyboard and screen reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from hybrid5d.html import document, table
from hybrid5d.plan.forecast import Forecast, Prices
from hybrid5d.plan.memory import groups_of, host_at_load
from hybrid5d.plan.text import size

WIDTH, BAR, LEFT = 900, 22, 90


def page(result: Forecast) -> str:
    """The whole document."""
    layout = result.plan.layout
    title = f"Plan of {layout.world_size} ranks: tp {layout.tp}, cp {layout.cp}, dp {layout.dp}, pp {layout.pp}"
    parts = [_summary(result), _warnings(result.warnings)]
    if result.prices is not None:
        parts += [_memory(result.prices, result.hardware.memory_bytes), _time(result.prices), _traffic(result.prices)]
    parts += [_stages(result), _groups(result)]
    body = "\n".join(parts)
    return document(title, body)


def _summary(result: Forecast) -> str:
    batch, schedule = result.plan.batch, result.schedule
    facts = [
        f"{batch.global_batch_size} rows a step: {batch.gradient_accumulation_steps} micro-batches of "
        f"{batch.micro_batch_size} on each dp rank",
        f"schedule {schedule.name}, bubble {schedule.bubble:.1%}",
    ]
    if result.prices is not None:
        time, memory = result.prices.time, result.prices.memory
        worst = max(memory, key=lambda m: m.driver)
        verdict = "fits" if all(m.fits for m in memory) else "does not fit"
        card = f"{result.hardware.name} ({result.hardware.memory_gib:g} GiB)"
        facts = [
            f"{verdict} {card}: allocated {size(worst.allocated)} on "
            f"stage {worst.stage}, estimated driver's reading {size(worst.driver)}",
            f"{time.total:.4g} s a step, {time.tokens_per_second:,.0f} tokens/s, MFU {time.mfu['causal']:.1%} (causal)",
            *facts,
        ]
    return f"<ul>{''.join(f'<li>{escape(f)}</li>' for f in facts)}</ul>"


def _warnings(warnings: Sequence[str]) -> str:
    if not warnings:
        return ""
    items = "".join(f'<li class="warning">{escape(w)}</li>' for w in warnings)
    return f"<h2>Warnings</h2><ul>{items}</ul>"


def _bars(label: str, rows: Mapping[str, Mapping[str, float]], unit: str, limit: float | None = None) -> str:
    """Stacked horizontal bars, one a row, with a legend; each piece carries its name and value as its title."""
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    most = max([*(sum(parts.values()) for parts in rows.values()), limit or 0, 1e-12])
    scale, drawn = (WIDTH - LEFT - 10) / most, []
    for i, (row, parts) in enumerate(rows.items()):
        x, y = float(LEFT), 4 + i * (BAR + 6)
        drawn.append(f'<text x="0" y="{y + BAR - 6}">{escape(row)}</text>')
        for k, name in enumerate(names):
            width = parts.get(name, 0) * scale
            if width > 0.2:
                shown = size(parts[name]) if unit == "bytes" else f"{parts[name]:.3g} s"
                drawn.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="var(--c{k % 8})" '
                    f'stroke="var(--page)"><title>{escape(f"{row}: {name} {shown}")}</title></rect>'
                )
            x += width
    height = 8 + len(rows) * (BAR + 6)
    if limit:
        at = LEFT + limit * scale
        drawn.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{height}" stroke="var(--bad)" stroke-width="2" '
            'stroke-dasharray="6 4"/>'
        )
    legend = "".join(
        f'<li><span style="background: var(--c{k % 8})"></span>{escape(n)}</li>' for k, n in enumerate(names)
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{"".join(drawn)}</svg>'
        f'<ul class="legend" aria-label="colours">{legend}</ul>'
    )


def _memory(prices: Prices, card: int) -> str:
    kinds = {f"stage {m.stage}": m.kinds() for m in prices.memory}
    head = ["stage", "allocated", "at", *next(iter(kinds.values())), "reserved", "driver"]
    rows = [
        [str(m.stage), size(m.allocated), m.peak_at.replace("_", " "), *map(size, m.kinds().values()), size(m.reserved),
         size(m.driver)]
        for m in prices.memory
    ]  # fmt: skip
    groups = ", ".join(f"{name} of {n}" for name, n in groups_of(prices.job).items()) or "none"
    outside = ", ".join(f"{name} {size(value)}" for name, value in prices.memory[0].outside.items())
    summary = (
        f"{prices.memory[0].states}. Outside the allocator: {outside} ({groups}). "
        f"Host memory of a node at load: {size(host_at_load(prices.job))}."
    )
    return (
        "<h2>Memory of one rank</h2>"
        + _bars(
            "Memory by kind and stage; the dashed line is the card; the same numbers are in the table",
            kinds,
            "bytes",
            card,
        )
        + table("Bytes by stage. Allocated is the prediction; reserved and driver are estimates.", head, rows)
        + f"<p>{escape(summary)}</p>"
    )


def _time(prices: Prices) -> str:
    parts = {name.replace("_", " "): s for name, s in prices.time.parts.items()}
    rows = [[name, f"{s:.4g}", f"{s / prices.time.total:.1%}"] for name, s in parts.items()]
    return (
        "<h2>Time of a step</h2>"
        + _bars("Seconds by part; the same numbers are in the table", {"step": parts}, "seconds")
        + table("Seconds of an optimizer step by part", ["part", "seconds", "share"], rows)
    )


def _traffic(prices: Prices) -> str:
    axes = list(prices.traffic[0])
    rows = [
        [str(i), *(f"{size(s[a]['sent'])} in {s[a]['calls']:,}" for a in axes)] for i, s in enumerate(prices.traffic)
    ]
    return "<h2>Traffic</h2>" + table(
        "Bytes that one rank sends in a step, and in how many operations", ["stage", *axes], rows
    )


def _stages(result: Forecast) -> str:
    count = ["unknown" if s.parameters is None else f"{s.parameters:,}" for s in result.stages]
    rows = [
        [str(s.stage), " + ".join(map(str, s.runs)), count[s.stage], str(live)]
        for s, live in zip(result.stages, result.schedule.live_chunks)
    ]
    head = ["stage", "decoder layers", "parameters a rank", "chunks alive"]
    return "<h2>Stages</h2>" + table("Pipeline stages", head, rows)


def _groups(result: Forecast) -> str:
    rows = [[axis, str(g.size), str(g.count), str(g.across_nodes)] for axis, g in result.groups.items()]
    caption = f"Groups of ranks; a node has {result.gpus_per_node}"
    return "<h2>Groups</h2>" + table(caption, ["axis", "ranks", "groups", "across nodes"], rows)
