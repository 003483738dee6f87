"""What our HTML pages share: one file each, no script, light and dark, read by keyboard and screen reader."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
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
svg text.in { fill: var(--page); font-size: 11px; pointer-events: none; }
"""


def document(title: str, body: str) -> str:
    """A whole page; `body` comes below its heading."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{escape(title)}</h1>\n{body}\n</main>\n</body>\n</html>\n"
    )


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with a caption, scrolled by keyboard where it is wide; the first cell of a row is its heading."""
    top = "".join(f'<th scope="col">{escape(h)}</th>' for h in head)
    lines = []
    for first, *rest in rows:
        cells = "".join(f"<td>{escape(c)}</td>" for c in rest)
        lines.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    title = escape(caption)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{title}"><table><caption>{title}'
        f"</caption><thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )
