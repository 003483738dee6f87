"""Plain nested dicts addressed by dotted paths, and nearest-name hints."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

MISSING = object()
NEAR = 0.75  # similarity from which a name is worth a hint


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
    put_at(tree, path.split("."), value)


def put_at(tree: dict[str, Any], names: Sequence[str], value: Any) -> None:
    """`put` by names, which may hold dots."""
    for name in names[:-1]:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    tree[names[-1]] = value


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


def copied(value: Any) -> Any:
    """A copy that shares no mapping and no list."""
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    return [copied(v) for v in value] if isinstance(value, list) else value


def walk(tree: Any, here: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(names, value) of every leaf. Lists and empty mappings are leaves."""
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from walk(value, (*here, str(name)))
    elif here:
        yield here, tree


def leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """`walk` with dotted paths; names that hold dots themselves look like nested ones."""
    return ((".".join(names), value) for names, value in walk(tree))


def nearest(name: str, known: Iterable[str], cutoff: float = NEAR) -> str | None:
    """The most similar known name, or None where nothing is similar."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return close[0] if close else None
