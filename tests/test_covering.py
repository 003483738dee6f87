"""Covering arrays hold every combination that is allowed, and the layouts of `make test` hold every pair of choices."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest

from tests import layouts
from tests.covering import Row, covering

SMALL: dict[str, tuple[Any, ...]] = {"a": (1, 2, 3), "b": (1, 2, 3), "c": (False, True), "d": ("x", "y"), "e": (0, 1)}


def small_allowed(row: Row) -> bool:
    if row.get("a", 1) * row.get("b", 1) > 4:
        return False
    return not (row.get("c") and row.get("a", 2) == 1) and not (row.get("d") == "y" and row.get("e") == 1)


@pytest.mark.parametrize("strength", [1, 2, 3, 4])
def test_every_allowed_combination_occurs(strength: int) -> None:
    everything = [dict(zip(SMALL, values)) for values in product(*SMALL.values())]
    legal = [row for row in everything if small_allowed(row)]
    rows = covering(SMALL, small_allowed, strength)
    assert all(row in legal for row in rows)
    wanted = {t for row in legal for t in combinations(row.items(), strength)}
    assert {t for row in rows for t in combinations(row.items(), strength)} == wanted
    assert len(rows) < len(legal) * (0.25, 0.5, 0.8, 1)[strength - 1]


def _forbidden_for_a_reason(f: str, a: Any, g: str, b: Any) -> bool:
    """No layout has both: by the ranks, SP's need of tp, ZeRO's of pp 1 and 1f1b, layers or heads; written by hand."""
    pair = {f: a, g: b}
    ranks = 1
    for axis in ("tp", "pp", "cp", "dp"):
        ranks *= pair.get(axis, 1)
    method, cp, tp = pair.get("method", "-"), pair.get("cp"), pair.get("tp")
    if method == "a2a+p2p":
        others = ranks // (cp or 1)
        return cp not in (None, 4) or others > 2
    at_least = 2 if method != "-" and cp is None else 1
    if "sp" in pair and pair["sp"] and tp is None:
        at_least *= 2
    return (
        ranks * at_least > 8
        or (pair.get("sp") is True and tp == 1)
        or (pair.get("zero", 1) > 1 and pair.get("pp", 1) > 1)
        or ("method" in pair and cp is not None and (method == "-") != (cp == 1))
        or (method == "a2a" and (cp == 3 or tp == 4))
        or (pair.get("dp") in (3, 4) and pair.get("micro") == 4)
        or (pair.get("schedule") in ("interleaved", "zbv") and pair.get("pp") == 4)  # 6 stages of 8 or more
        or (pair.get("schedule", "1f1b") not in ("1f1b", "wide") and pair.get("zero", 1) > 1)
    )


def test_make_test_trains_every_pair_of_choices() -> None:
    held = {t for row in layouts.rows(2) for t in combinations(row.items(), 2)}
    for f, g in combinations(layouts.FACTORS, 2):
        for a, b in product(layouts.FACTORS[f], layouts.FACTORS[g]):
            assert (((f, a), (g, b)) in held) is not _forbidden_for_a_reason(f, a, g, b), (f, a, g, b)


def test_triples_hold_all_pairs() -> None:
    triples = {t for row in layouts.rows(3) for t in combinations(row.items(), 2)}
    assert {t for row in layouts.rows(2) for t in combinations(row.items(), 2)} <= triples


def test_a_case_says_what_its_row_says() -> None:
    case = layouts.case({**layouts.rows(2)[-1], "cp": 4, "method": "a2a+p2p", "recompute": "selective", "zero": 0,
                         "schedule": "zb-h1"})  # fmt: skip
    assert case.layout.model == {
        "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [2, 2], "recompute_granularity": "selective",
        "pipeline_schedule": "zb-h1",
    }  # fmt: skip
    assert case.layout.zero == 0 and case.layout.cp == 4
