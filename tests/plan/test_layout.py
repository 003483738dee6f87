"""Rank arithmetic: a bijection, and Megatron's group tables."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid5d.plan.layout import AXES, ParallelLayout

degree = st.integers(1, 5)
layouts = st.builds(ParallelLayout, pp=degree, dp=degree, cp=degree, tp=degree)


@settings(deadline=None)
@given(layouts)
def test_rank_and_coordinate_are_inverse(layout: ParallelLayout) -> None:
    seen = set()
    for rank in range(layout.world_size):
        at = layout.coordinate(rank)
        assert layout.rank(pp=at.pp, dp=at.dp, cp=at.cp, tp=at.tp) == rank
        assert rank == at.tp + layout.tp * (at.cp + layout.cp * (at.dp + layout.dp * at.pp))
        seen.add(at)
    assert len(seen) == layout.world_size


@settings(deadline=None)
@given(layouts, st.sets(st.sampled_from(AXES), min_size=1))
def test_groups_partition_the_world(layout: ParallelLayout, axes: set[str]) -> None:
    groups = layout.groups(*axes)
    assert sorted(chain.from_iterable(groups)) == list(range(layout.world_size))
    size = 1
    for axis in axes:
        size *= getattr(layout, axis)
    for group in groups:
        assert len(group) == size and group == sorted(group)
        for rank in group:
            assert layout.group_of(rank, *axes) == group
            for axis in set(AXES) - axes:
                assert getattr(layout.coordinate(rank), axis) == getattr(layout.coordinate(group[0]), axis)


@settings(deadline=None)
@given(layouts)
def test_closed_forms_of_megatrons_groups(layout: ParallelLayout) -> None:
    tp, cp, dp, world = layout.tp, layout.cp, layout.dp, layout.world_size
    assert layout.groups("tp") == [list(range(i, i + tp)) for i in range(0, world, tp)]
    stage = world // layout.pp
    assert layout.groups("pp") == [list(range(i, world, stage)) for i in range(stage)]
    starts = [a + b for a in range(0, world, tp * cp) for b in range(tp)]
    assert layout.groups("cp") == sorted([start + tp * c for c in range(cp)] for start in starts)
    starts = [a + b for a in range(0, world, stage) for b in range(tp * cp)]
    assert layout.groups("dp") == sorted([start + tp * cp * d for d in range(dp)] for start in starts)


def test_measured_tables() -> None:
    eight = ParallelLayout(tp=2, cp=2, dp=2)
    assert eight.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert eight.groups("cp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert eight.groups("dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert eight.groups("dp", "cp") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert ParallelLayout(tp=2, dp=2, pp=2).groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "2", None])
def test_degrees_are_positive_integers(bad: object) -> None:
    with pytest.raises(ValueError, match="degree"):
        ParallelLayout(tp=bad)  # type: ignore[arg-type]


def test_what_lies_outside_is_refused() -> None:
    layout = ParallelLayout(tp=2)
    for call in (lambda: layout.rank(tp=2), lambda: layout.coordinate(2), lambda: layout.groups("sp"), layout.groups):
        with pytest.raises(ValueError):
            call()
