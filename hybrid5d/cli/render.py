"""Tables for the terminal. Only this module and the console sink know rich."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybrid5d.config.classify import OTHER_COMPONENT
from hybrid5d.plan.convert import Translation

TITLES = {
    "overridden": "Overridden: another key wins",
    "dropped": "Dropped: no place in a DeepSpeed run",
    "engine": "Engine: done by hybrid5d, no DeepSpeed key",
    "deepspeed": "DeepSpeed: in ds_config.json",
    "defaulted": "Defaulted: absent from the YAML",
}


def console(stderr: bool = False) -> Console:
    """A console that wraps nothing and colours only terminals."""
    terminal = Console(stderr=stderr, highlight=False, soft_wrap=False)
    return terminal if terminal.is_terminal else Console(stderr=stderr, highlight=False, width=200, no_color=True)


def show(value: Any, longest: int = 60) -> str:
    """A value as YAML users write it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _facts(title: str, facts: dict[str, Any]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in facts.items():
        if not isinstance(value, dict):
            table.add_row(name, show(value))
    return table


def translation_text(out: Console, result: Translation) -> None:
    """The whole story: verdict, numbers, what the user must know, then every key."""
    data = result.to_dict()
    out.print(
        Text(f"{data['verdict'].upper()}: {result.keys.path}", style="bold green" if not result.errors else "bold red")
    )
    if result.errors:
        out.print(f"{len(result.errors)} reason(s), on standard error")
    for name in ("layout", "batch", "optimizer", "schedule", "precision"):
        if data[name] is not None:
            out.print(_facts(name, data[name]))
    if result.plan is not None and result.plan.layout.cp > 1:
        cp, size = result.plan.layout.cp, data["deepspeed"]["train_batch_size"]
        out.print(f"DeepSpeed's train_batch_size is {size}: cp={cp} is folded into its data axis")
    if result.notices:
        out.print(Text("\nWhat you should know", style="bold"))
        for notice in result.notices:
            out.print(Text(f"  - {notice}"), soft_wrap=True)
    for disposition, title in TITLES.items():
        rows = _folded([e for e in result.report if e["disposition"] == disposition])
        if rows:
            out.print(_entries(title, rows))


def _folded(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Blocks of other components as one row each; `--explain BLOCK` and the JSON form list their keys."""
    counts: dict[str, int] = {}
    kept = []
    for row in rows:
        if row["why"] != OTHER_COMPONENT:
            kept.append(row)
            continue
        block = row["key"].split(".")[0]
        counts[block] = counts.get(block, 0) + 1
    folded = [
        {"key": f"{block}.*", "value": f"{n} keys", "target": None, "why": OTHER_COMPONENT}
        for block, n in counts.items()
    ]
    return kept + folded


def _entries(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), title_style="bold")
    for column in ("key", "value", "goes to", "why"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(Text(row["key"]), Text(show(row["value"])), Text(row["target"] or ""), Text(row["why"]))
    return table


def explain_text(out: Console, lines: list[tuple[str, str]]) -> None:
    """One key's story as name: text lines."""
    for name, text in lines:
        out.print(Text(f"{name:<12} {text}"), soft_wrap=True)
