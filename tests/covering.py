"""Covering arrays: few rows in which every allowed combination of `strength` values occurs (2: pairs, 3: triples).

Most faults of parallel code need two things at once (SP with tied weights, Ulysses with repeated kv heads). A set of
layouts that has every pair finds those at a twentieth of the cost of all layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
Tuple = tuple[tuple[str, Any], ...]  # some (factor, value) pairs, in the order of the factors


def tuples(row: Row, strength: int) -> Iterable[Tuple]:
    """The combinations of `strength` values that a row holds."""
    return combinations(row.items(), strength)


def covering(
    factors: Mapping[str, tuple[Any, ...]],
    allowed: Callable[[Row], bool],
    cost: Callable[[Row], float],
    strength: int = 2,
    tries: int = 8,
) -> list[Row]:
    """Rows (factor -> value) that hold every combination of `strength` values which some allowed row can hold.

    Greedy, and the same on every machine: each of the first `tries` combinations still missing is completed to a row,
    factor by factor, with the value that adds most missing combinations; the row with most of them per cost is kept.

    Args:
        allowed: may a row, also one that lacks factors, be part of the array? It must stay False once it is.
        cost: of a full row, above 0.
    """
    names = list(factors)
    missing: dict[Tuple, None] = {}
    for chosen in combinations(names, strength):
        for values in product(*(factors[n] for n in chosen)):
            missing[tuple(zip(chosen, values))] = None

    def gain(row: Row, name: str, value: Any) -> int:
        order = {**{n: row[n] for n in names if n in row}}
        order = {n: (value if n == name else row.get(n)) for n in names if n in row or n == name}
        others = [(n, v) for n, v in order.items() if n != name]
        found = 0
        for rest in combinations(others, strength - 1):
            key = tuple(sorted((*rest, (name, value)), key=lambda item: names.index(item[0])))
            found += key in missing
        return found

    def complete(row: Row) -> Row | None:
        if not allowed(row):
            return None
        open_names = [n for n in names if n not in row]
        if not open_names:
            return {n: row[n] for n in names}
        name = open_names[0]
        for value in sorted(factors[name], key=lambda v: -gain(row, name, v)):
            full = complete({**row, name: value})
            if full is not None:
                return full
        return None

    rows: list[Row] = []
    while missing:
        best, most = None, 0.0
        starts = []
        for key in list(missing):
            if len(starts) == tries:
                break
            full = complete(dict(key))
            if full is None:
                del missing[key]  # no allowed row holds it
                continue
            starts.append(key)
            worth = sum(t in missing for t in tuples(full, strength)) / cost(full)
            if worth > most:
                best, most = full, worth
        if best is not None:
            rows.append(best)
            for key in tuples(best, strength):
                missing.pop(key, None)
    return rows
