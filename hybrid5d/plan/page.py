"""A forecast as one HTML page: self-contained, no script, light and dark, read by keyboard and screen reader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from hybrid5d.plan.forecast import Forecast, Prices
from hybrid5d.plan.memory import groups_of, host_at_load
from hybrid5d.plan.text import size

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1b1f24; --faint: #59636e; --line: #d0d7de; --bad: #a40e26;
  --c0: #0b5cad; --c1: #b35900; --c2: #1a7f37; --c3: #8250df; --c4: #bf3989;
  --c5: #57606a; --c6: #0e7490; --c7: #7a5c00; }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --text: #e6edf3; --faint: #9da7b3; --line: #3d444d;
  --bad: #ff8182; --c0: #58a6ff; --c1: #f0883e; --c2: #56d364; --c3: #bc8cff; --c4: #ff7bbd; --c5: #afb8c1;
  --c6: #39c5cf; --c7: #e3b341; } }
body { background: var(--page); color: var(--text); font: 16px/1.5 system-ui, sans-serif; max-width: 70rem;
  margin: 0 auto; padding: 1rem 1.5rem 4rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
table { border-collapse: collapse; } caption { text-align: left; color: var(--faint); padding-bottom: .4rem; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .9rem .25rem 0; text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; }
.scroll { overflow-x: auto; } .scroll:focus { outline: 2px solid var(--c0); }
.warning { color: var(--bad); }
.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; }
.legend span { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border: 1px solid var(--text); }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--text); font: 12px system-ui, sans-serif; }
"""
WIDTH, BAR, LEFT = 900, 22, 90


def page(found: Forecast) -> str:
    """The whole document."""
    layout = found.plan.layout
    title = f"Plan of {layout.world_size} ranks: tp {layout.tp}, cp {layout.cp}, dp {layout.dp}, pp {layout.pp}"
    parts = [f"<h1>{escape(title)}</h1>", _summary(found), _warnings(found.warnings)]
    if found.prices is not None:
        parts += [_memory(found.prices, found.hardware.memory_bytes), _time(found.prices), _traffic(found.prices)]
    parts += [_stages(found), _groups(found)]
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(h)}</th>' for h in head)
    lines = []
    for first, *rest in rows:
        cells = "".join(f"<td>{escape(c)}</td>" for c in rest)
        lines.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    told = escape(caption)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{told}"><table><caption>{told}'
        f"</caption><thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _summary(found: Forecast) -> str:
    batch, schedule = found.plan.batch, found.schedule
    facts = [
        f"{batch.global_batch_size} rows a step: {batch.gradient_accumulation_steps} micro-batches of "
        f"{batch.micro_batch_size} on each dp rank",
        f"schedule {schedule.name}, bubble {schedule.bubble:.1%}",
    ]
    if found.prices is not None:
        time, memory = found.prices.time, found.prices.memory
        worst = max(memory, key=lambda m: m.driver)
        verdict = "fits" if all(m.fits for m in memory) else "does not fit"
        card = f"{found.hardware.name} ({found.hardware.memory_gib:g} GiB)"
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
    told = (
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
        + _table("Bytes by stage. Allocated is the prediction; reserved and driver are estimates.", head, rows)
        + f"<p>{escape(told)}</p>"
    )


def _time(prices: Prices) -> str:
    parts = {name.replace("_", " "): s for name, s in prices.time.parts.items()}
    rows = [[name, f"{s:.4g}", f"{s / prices.time.total:.1%}"] for name, s in parts.items()]
    return (
        "<h2>Time of a step</h2>"
        + _bars("Seconds by part; the same numbers are in the table", {"step": parts}, "seconds")
        + _table("Seconds of an optimizer step by part", ["part", "seconds", "share"], rows)
    )


def _traffic(prices: Prices) -> str:
    axes = list(prices.traffic[0])
    rows = [
        [str(i), *(f"{size(s[a]['sent'])} in {s[a]['calls']:,}" for a in axes)] for i, s in enumerate(prices.traffic)
    ]
    return "<h2>Traffic</h2>" + _table(
        "Bytes that one rank sends in a step, and in how many operations", ["stage", *axes], rows
    )


def _stages(found: Forecast) -> str:
    rows = [
        [str(s.stage), str(s.decoder_layers), "unknown" if s.parameters is None else f"{s.parameters:,}", str(live)]
        for s, live in zip(found.stages, found.schedule.live_chunks)
    ]
    head = ["stage", "decoder layers", "parameters a rank", "chunks alive"]
    return "<h2>Stages</h2>" + _table("Pipeline stages", head, rows)


def _groups(found: Forecast) -> str:
    rows = [[axis, str(g.size), str(g.count), str(g.across_nodes)] for axis, g in found.groups.items()]
    caption = f"Groups of ranks; a node has {found.gpus_per_node}"
    return "<h2>Groups</h2>" + _table(caption, ["axis", "ranks", "groups", "across nodes"], rows)
