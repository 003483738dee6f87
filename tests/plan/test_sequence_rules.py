"""Which heads Ulysses can cut, and which ranks form its groups."""

import pytest

from hybrid5d.plan.layout import ParallelLayout
from hybrid5d.plan.sequence_rules import check_heads, check_hierarchical, default_ulysses, hybrid_groups


@pytest.mark.parametrize(
    "q,kv,tp,cp,method,ulysses,legal",
    [
        (4, 2, 1, 4, "a2a", None, True),  # kv heads repeated
        (4, 2, 2, 2, "a2a", None, True),  # one local kv head
        (6, 3, 1, 2, "a2a", None, False),  # uneven groups
        (8, 8, 1, 2, "a2a", None, True),
        (8, 8, 1, 3, "a2a", None, False),
        (8, 8, 4, 4, "a2a", None, False),
        (6, 3, 1, 3, "a2a", None, True),
        (6, 3, 1, 4, "a2a+p2p", 2, False),
        (6, 3, 1, 6, "a2a+p2p", 3, True),
        (6, 3, 1, 4, "p2p", None, True),
        (7, 1, 1, 4, "all_gather", None, True),
        (7, 1, 1, 7, "a2a", None, True),
    ],
)
def test_heads(q, kv, tp, cp, method, ulysses, legal):
    errors = check_heads(q, kv, tp, cp, method, ulysses)
    assert bool(errors) != legal
    for error in errors:
        text = str(error)
        for part in (f"heads {q}", f"heads {kv}", f"model_parallel_size {tp}", f"context_parallel_size {cp}", method):
            assert part in text


def test_the_fix_names_legal_degrees():
    (error,) = check_heads(6, 3, 1, 6, "a2a+p2p", 2)
    assert "{1, 3, 6}" in error.fix


def test_hierarchical_sizes():
    assert check_hierarchical([2, 2], 4, "a2a+p2p") == []
    assert check_hierarchical(None, 4, "p2p") == []
    for sizes, cp, method in [([2, 2], 8, "a2a+p2p"), ([4], 4, "a2a+p2p"), ([2, 2], 4, "p2p"), ([0, 4], 4, "a2a+p2p")]:
        (error,) = check_hierarchical(sizes, cp, method)
        assert "hierarchical_context_parallel_sizes" in error.key


def test_default_ulysses():
    assert default_ulysses(num_kv_heads=8, tp=2, cp=8) == 4
    assert default_ulysses(num_kv_heads=2, tp=2, cp=8) == 1
    assert default_ulysses(num_kv_heads=8, tp=1, cp=6) == 2
    assert default_ulysses(num_kv_heads=8, tp=2, cp=8, ranks_per_node=4) == 2  # 4 would span two nodes


def test_hybrid_groups():
    assert hybrid_groups([[0, 1, 2, 3]], 2) == ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    assert hybrid_groups([[0, 1, 2, 3, 4, 5]], 2)[1] == [[0, 2, 4], [1, 3, 5]]
    layout = ParallelLayout(pp=2, cp=4, tp=2)
    inner, outer = hybrid_groups(layout.groups("cp"), 2)
    assert inner[0] == [0, 2] and outer[0] == [0, 4]
    for groups in (inner, outer):
        assert sorted(r for g in groups for r in g) == list(range(16))
