"""The cut of a micro-batch over context-parallel ranks: pure arithmetic."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid5d.plan.sequence import SequencePlan
from hybrid5d.plan.sequence_blocks import Block

METHODS = ("p2p", "a2a", "a2a+p2p", "all_gather")


@st.composite
def plans(draw, max_cp=8):
    cp = draw(st.integers(1, max_cp))
    method = draw(st.sampled_from(METHODS))
    return SequencePlan.build(
        draw(st.lists(st.lists(st.integers(0, 40), max_size=4), min_size=1, max_size=3)),
        cp,
        method,
        ulysses=draw(st.sampled_from([u for u in range(1, cp + 1) if cp % u == 0])),
        load_balance=draw(st.sampled_from(["zigzag", "contiguous"])),
        multiple=draw(st.integers(1, 3)),
        packed=draw(st.booleans()),
    )


@given(plans())
@settings(max_examples=150, deadline=None)
def test_every_token_lies_on_one_rank_and_comes_back(plan):
    index = np.stack([plan.source_index(r) for r in range(plan.cp)])
    assert index.shape == (plan.cp, plan.batch, plan.local_length)
    rows = [sum(row) for row in plan.documents]
    for row, n in enumerate([sum(rows)] if plan.packed else rows):
        tokens = np.random.default_rng(0).permutation(n)
        mine = index[:, row]
        assert sorted(mine[mine >= 0]) == list(range(n))
        held = np.zeros(index.shape, dtype=int)  # what the ranks hold, -1 where they pad
        held[:, row] = np.append(tokens, -1)[mine]
        assert (held.ravel()[plan.natural_index()[row]] == tokens).all()


@given(plans())
@settings(max_examples=50, deadline=None)
def test_shapes_are_what_the_neighbours_need(plan):
    same = (plan.documents, plan.cp, plan.method, plan.ulysses, plan.load_balance)
    again = SequencePlan.build(*same, multiple=3, packed=plan.packed)
    assert again.local_length % 3 == 0
    assert again.local_length >= 1
    assert 0 <= again.length - max(sum(again.padded), 1) < plan.ring + 3 * plan.cp


def allowed(plan: SequencePlan, window: int | None) -> np.ndarray:
    """[S, S] over the ring-local places of all ring ranks: may this place attend to that one, by documents."""
    document = np.full(plan.ring * plan.ring_length, -1)
    position = np.zeros_like(document)
    for rank in range(plan.ring):
        for d, segments in enumerate(plan.segments(rank)):
            for s in segments:
                place = rank * plan.ring_length + s.offset
                document[place : place + s.length] = d
                position[place : place + s.length] = range(s.start, s.stop)
    age = position[:, None] - position
    mask = (document[:, None] == document) & (document >= 0)[:, None] & (age >= 0)
    return mask if window is None else mask & (age < window)


def mask_of(block: Block) -> np.ndarray:
    age = np.arange(block.q1 - block.q0)[:, None] - np.arange(block.k1 - block.k0)
    if block.kind == "full":
        return np.ones(age.shape, dtype=bool)
    if block.kind == "causal":
        assert age.shape[0] == age.shape[1]
        return age >= 0
    return (age + block.shift >= 0) & (age + block.shift < block.window)


@given(plans(), st.sampled_from([None, 1, 7, 100]))
@settings(max_examples=150, deadline=None)
def test_blocks_compute_every_allowed_score_once_and_no_other(plan, window):
    computed = np.zeros((plan.ring * plan.ring_length,) * 2, dtype=int)
    for rank in range(plan.ring):
        seen = np.zeros(plan.ring_length, dtype=bool)
        for i, step in enumerate(plan.steps(rank, window)):
            assert step.source == (rank - i) % plan.ring
            assert not step.blocks or i <= plan.hops(window)
            assert bool(step.blocks) == plan.sees(rank, step.source, window)
            for block in step.blocks:
                assert block.q1 > block.q0 and block.k1 > block.k0
                mask = mask_of(block)
                assert mask.any(axis=1).all(), "a row without keys would give an lse of nothing"
                assert mask.sum() == block.scores
                assert block.first == (not seen[block.rows].any())
                assert block.first or seen[block.rows].all() or window is not None
                seen[block.rows] = True
                rows = slice(rank * plan.ring_length + block.q0, rank * plan.ring_length + block.q1)
                keys = slice(step.source * plan.ring_length + block.k0, step.source * plan.ring_length + block.k1)
                computed[rows, keys] += mask
    np.testing.assert_array_equal(computed, allowed(plan, window))


@pytest.mark.parametrize("window", [300, 1000])
def test_windows_are_cut_into_strips(window):
    plan = SequencePlan.build(((4000,),), 2)
    blocks = [b for r in range(2) for step in plan.steps(r, window) for b in step.blocks]
    assert max(b.q1 - b.q0 for b in blocks) <= 256
    exact = sum(min(i + 1, window) for i in range(4000))
    assert sum(b.scores for b in blocks) == exact
    assert sum((b.q1 - b.q0) * (b.k1 - b.k0) for b in blocks) < 1.9 * exact + 4000 * 256


def test_zigzag_and_contiguous_by_hand():
    """seq 16, cp 2: rank 0 has 0-3 and 12-15, rank 1 has 4-11."""
    zigzag = SequencePlan.build(((16,),), 2)
    assert zigzag.source_index(0).tolist() == [[0, 1, 2, 3, 12, 13, 14, 15]]
    assert zigzag.source_index(1).tolist() == [[4, 5, 6, 7, 8, 9, 10, 11]]
    contiguous = SequencePlan.build(((16,),), 2, load_balance="contiguous")
    assert contiguous.source_index(1).tolist() == [[8, 9, 10, 11, 12, 13, 14, 15]]
    ulysses = SequencePlan.build(((15,),), 4, "a2a")
    assert ulysses.source_index(3).tolist() == [[12, 13, 14, -1]]
    hybrid = SequencePlan.build(((16,),), 4, "a2a+p2p", ulysses=2)
    assert [hybrid.source_index(r).tolist()[0] for r in range(4)] == [
        [0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11],
    ]  # fmt: skip


def test_packed_documents_are_cut_one_by_one():
    plan = SequencePlan.build(((5, 4), (3,)), 2, packed=True)
    assert plan.batch == 1
    assert plan.padded == (8, 4, 4)
    assert plan.source_index(0).tolist() == [[0, 1, -1, -1, 5, 8, 9, -1]]
    assert plan.source_index(1).tolist() == [[2, 3, 4, -1, 6, 7, 10, 11]]


@pytest.mark.parametrize("method,ulysses", [("p2p", 1), ("all_gather", 1), ("a2a+p2p", 2)])
@pytest.mark.parametrize("documents", [((4096,),), ((1003,),), ((700, 411, 1800, 37), (900,))])
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_balance(method, ulysses, documents, cp):
    """Equal work on every rank, and in total the exact causal area."""
    plan = SequencePlan.build(documents, cp, method, ulysses, packed=len(documents) > 1)
    counts = [plan.scores(r) for r in range(cp)]
    assert max(counts) <= 1.02 * min(counts)
    exact = sum(n * (n + 1) // 2 for row in documents for n in row)
    assert exact <= sum(counts) / plan.ulysses <= 1.02 * exact


def test_contiguous_is_the_slow_one():
    counts = [SequencePlan.build(((64,),), 4, load_balance="contiguous").scores(r) for r in range(4)]
    assert counts == [136, 136 + 256, 136 + 512, 136 + 768]
    zigzag = [SequencePlan.build(((64,),), 4).scores(r) for r in range(4)]
    assert len(set(zigzag)) == 1 and sum(zigzag) == sum(counts) == 64 * 65 // 2


def test_short_windows_travel_less():
    plan = SequencePlan.build(((64,),), 8, load_balance="contiguous")
    assert plan.hops() == 7
    assert plan.hops(window=5) == 1


def test_equal_arguments_give_the_same_plan():
    assert SequencePlan.build(((7,),), 2) is SequencePlan.build([[7]], 2)
    assert SequencePlan.build(((7,),), 2) is not SequencePlan.build([[8]], 2)


def test_nothing_to_do_still_has_a_shape():
    plan = SequencePlan.build(((), (0,)), 4, multiple=2)
    assert (plan.batch, plan.local_length, plan.tokens) == (2, 2, 0)
    assert all((plan.source_index(r) == -1).all() for r in range(4))


@pytest.mark.parametrize("bad", [{"method": "ring"}, {"load_balance": "striped"}, {"method": "a2a+p2p", "ulysses": 3}])
def test_refusals(bad):
    with pytest.raises(ValueError):
        SequencePlan.build(((8,),), 4, **bad)


def test_no_torch():
    code = "import sys, hybrid5d.plan.sequence, hybrid5d.plan.sequence_rules; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
