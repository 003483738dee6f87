"""Process groups: every one is the set of ranks the layout says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hybrid5d.parallel.context import ParallelContext
from hybrid5d.plan.layout import ParallelLayout
from tests.harness import run_ranks

AXES = {"tp": ("tp",), "cp": ("cp",), "dp": ("dp",), "pp": ("pp",), "dp_cp": ("dp", "cp"), "pp_tp": ("pp", "tp")}


def _sums(rank: int, layout: ParallelLayout) -> dict[str, tuple[int, tuple[int, ...]]]:
    ctx = ParallelContext.create(layout)
    found = {}
    for name in AXES:
        axis = getattr(ctx, name)
        x = torch.tensor([rank])
        if axis.size > 1:
            dist.all_reduce(x, group=axis.group)
        assert axis.ranks[axis.rank] == rank
        found[name] = (int(x), axis.ranks)
    return found


def members_of(rank: int, layout: ParallelLayout, axes: tuple[str, ...]) -> list[int]:
    """The ranks that differ from `rank` in `axes` alone, by rank = tp + TP*(cp + CP*(dp + DP*pp)) written out."""

    def place(r: int) -> dict[str, int]:
        tp, r = r % layout.tp, r // layout.tp
        cp, r = r % layout.cp, r // layout.cp
        return {"tp": tp, "cp": cp, "dp": r % layout.dp, "pp": r // layout.dp}

    mine = place(rank)
    world = layout.tp * layout.cp * layout.dp * layout.pp
    return [r for r in range(world) if all(v == mine[a] for a, v in place(r).items() if a not in axes)]


@pytest.mark.parametrize(
    "layout", [ParallelLayout(pp=2, cp=2, tp=2), ParallelLayout(dp=2, cp=2, tp=2), ParallelLayout(pp=2, dp=2, tp=2)]
)
def test_sum_of_ranks_in_each_group(layout: ParallelLayout) -> None:
    for rank, found in enumerate(run_ranks(8, _sums, layout)):
        for name, axes in AXES.items():
            members = members_of(rank, layout, axes)
            assert found[name] == (sum(members), tuple(members))


def _wrong_world(rank: int) -> str:
    try:
        ParallelContext.create(ParallelLayout(tp=4))
    except ValueError as exc:
        return str(exc)
    return ""


def test_world_that_is_not_the_layouts() -> None:
    assert run_ranks(2, _wrong_world) == ["world size 2 but pp*dp*cp*tp = 4"] * 2
