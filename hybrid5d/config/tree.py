"""Plain nested dicts addressed by dotted paths, and nearest-name hints."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any

MISSING = object()


def get(tree: Any, path: str, default: Any = None) -> Any:
    """Value at a dotted path; `default` where the path does not exist."""
    for part in path.split(".") if path else ():
        if not isinstance(tree, dict) or part not in tree:
            return default
        tree = tree[part]
    return tree


def has(tree: Any, path: str) -> bool:
    """True where the path exists (a null value counts)."""
    return get(tree, path, MISSING) is not MISSING


def put(tree: dict[str, Any], path: str, value: Any) -> None:
    """Set a path, making mappings on the way (a non-mapping on the way is replaced)."""
    *parents, last = path.split(".")
    for part in parents:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    tree[last] = value


def drop(tree: dict[str, Any], path: str) -> bool:
    """Remove a path; False where it was not there."""
    parent, _, last = path.rpartition(".")
    holder = get(tree, parent)
    if not isinstance(holder, dict) or last not in holder:
        return False
    del holder[last]
    return True


def merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """`top` over `base`: mappings are merged, everything else is replaced. Neither input is changed."""
    result = dict(base)
    for name, value in top.items():
        old = result.get(name)
        result[name] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every leaf. Lists and empty mappings are leaves."""
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from leaves(value, f"{prefix}.{name}" if prefix else str(name))
    elif prefix:
        yield prefix, tree


def nearest(name: str, known: Iterable[str], cutoff: float = 0.75) -> str | None:
    """The most similar known name, or None where nothing is similar."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return found[0] if found else None
