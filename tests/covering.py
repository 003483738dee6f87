"""Covering arrays: few rows in which every allowed combination of `strength` values occurs (2: pairs, 3: triples).

Most faults of parallel code need two things at once (SP with tied weights, Ulysses with repeated kv heads). A set of
layouts that has every pair finds those at a twentieth of the cost of all layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
Tuple = tuple[tuple[str, Any], ...]  # some (factor, value) pairs, in the order of the factors


def covering(
    factors: Mapping[str, tuple[Any, ...]], allowed: Callable[[Row], bool], strength: int = 2, tries: int = 8
) -> list[Row]:
    """Rows (factor -> value) that hold every combination of `strength` values which some allowed row can hold.

    Greedy, and the same on every machine: each of the first `tries` combinations still missing is completed to a row,
    factor by factor, with the value that adds most missing combinations; the row that holds most of them is kept.

    Args:
        allowed: may a row, also one that lacks factors, be part of the array? It must stay False once it is.
    """
    order = {name: i for i, name in enumerate(factors)}
    missing: dict[Tuple, None] = {}
    for chosen in combinations(factors, strength):
        for values in product(*(factors[name] for name in chosen)):
            missing[tuple(zip(chosen, values))] = None

    def gain(row: Row, name: str, value: Any) -> int:
        keys = ((*rest, (name, value)) for rest in combinations(row.items(), strength - 1))
        return sum(tuple(sorted(key, key=lambda item: order[item[0]])) in missing for key in keys)

    def complete(row: Row) -> Row | None:
        if not allowed(row):
            return None
        name = next((n for n in factors if n not in row), None)
        if name is None:
            return {n: row[n] for n in factors}
        values = sorted(factors[name], key=lambda value: -gain(row, name, value))
        return next((full for value in values if (full := complete({**row, name: value}))), None)

    rows: list[Row] = []
    while missing:
        full_rows = []
        for key in list(missing):
            if len(full_rows) == tries:
                break
            full = complete(dict(key))
            if full is None:
                del missing[key]  # no allowed row holds it
            else:
                full_rows.append(full)
        if full_rows:
            rows.append(
                max(full_rows, key=lambda full: sum(t in missing for t in combinations(full.items(), strength)))
            )
            for held in combinations(rows[-1].items(), strength):
                missing.pop(held, None)
    return rows
