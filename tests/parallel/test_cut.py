"""Runs of tensors: cut, laid over each other, put together again."""

from __future__ import annotations

import itertools

import pytest
import torch

from hybrid5d.plan.cut import Cut

SHAPE = (6, 5)


def runs() -> list[Cut]:
    return [Cut(d, a, b) for d, n in enumerate(SHAPE) for a, b in itertools.combinations(range(n + 1), 2)] + [
        Cut.whole(SHAPE)
    ]


def test_overlaps_are_what_index_sets_say() -> None:
    full = torch.arange(30).reshape(SHAPE)
    for a, b in itertools.product(runs(), repeat=2):
        part_a, part_b = full[a.slices(SHAPE)], full[b.slices(SHAPE)]
        common = sorted(set(part_a.flatten().tolist()) & set(part_b.flatten().tolist()))
        both = a.overlap(b, SHAPE)
        assert (both is None) == (not common)
        if both is not None:
            assert part_a[both[0]].flatten().tolist() == part_b[both[1]].flatten().tolist() == common


def test_even_runs_cover_once() -> None:
    parts = [Cut.even(1, 12, 4, i) for i in range(4)]
    assert [c for p in parts for c in range(p.start, p.stop)] == list(range(12))
    with pytest.raises(ValueError, match="width=10 is not a multiple of the tensor-parallel size 4"):
        Cut.even(0, 10, 4, 0, "width")
