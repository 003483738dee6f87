"""Two forecasts side by side: what differs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and any(isinstance(x, (dict, list)) for x in value):
        for i, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{i}]")
    else:
        yield path, list(value) if isinstance(value, tuple) else value


def compare(a: dict[str, Any], b: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry per key whose value differs; null where one has no such key. `ratio`: b over a, of numbers."""
    first, second = dict(_leaves(a)), dict(_leaves(b))
    result = []
    for key in dict.fromkeys([*first, *second]):
        x, y = first.get(key), second.get(key)
        if x != y:
            numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (x, y))
            result.append({"key": key, "a": x, "b": y, "ratio": y / x if numbers and x else None})
    return result


def compare_text(changes: list[dict[str, Any]]) -> str:
    """Plain lines."""
    if not changes:
        return "no difference\n"
    rows = []
    for c in changes:
        ratio = "" if c["ratio"] is None else f"  x {c['ratio']:.3g}"
        rows.append(f"{c['key']}: {_shown(c['a'])} -> {_shown(c['b'])}{ratio}")
    return "\n".join(rows) + "\n"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
