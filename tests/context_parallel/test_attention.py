"""Every context-parallel method against full attention in fp64, forward and all gradients."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.attention_cases import Case, Error, Runner
from tests.harness import run_ranks

NAMES = ("out", "dq", "dk", "dv")
SHAPES = [  # documents, packed, window
    (((37,),), False, None),
    (((53,), (20,)), False, 7),
    (((31,), (64,), (9,)), False, None),
    (((5, 40, 3), (17,)), True, None),
    (((41, 1, 30),), True, 6),
    (((301,),), False, 90),
]


def matrix(cp: int) -> list[Case]:
    """All cases that are legal at this degree."""
    cases = []
    for kv_heads, (documents, packed, window) in product((8, 2, 1), SHAPES):
        base = Case("p2p", 8, kv_heads, documents, packed, window)
        cases += [base, replace(base, balance="contiguous"), replace(base, method="all_gather")]
        cases.append(replace(base, method="all_gather", balance="contiguous"))
        if cp != 3:  # 8 heads do not divide by 3
            cases.append(replace(base, method="a2a"))
            cases += [replace(base, method="a2a+p2p", ulysses=u) for u in (2, 4) if cp % u == 0 and u < cp]
    if cp == 3:
        cases += [Case("a2a", 6, kv, ((37,),), window=w) for kv in (6, 3, 1) for w in (None, 7)]
    return cases


def errors_of(rank: int, world: int, cases: list[Case]) -> list[list[Error]]:
    runner = Runner(rank, world)
    return [runner.errors(case) for case in cases]


def over_ranks(world: int, cases: list[Case]) -> list[list[Error]]:
    """Per case the errors of out, dq, dk, dv."""
    by_rank = run_ranks(world, errors_of, world, cases, timeout=150)
    return [[sum(e, Error()) for e in zip(*ranks)] for ranks in zip(*by_rank)]


@pytest.mark.parametrize("cp", [1, 2, 3, 4, pytest.param(8, marks=pytest.mark.full)])
def test_equals_full_attention(cp):
    cases = matrix(cp)
    single = Runner(0, 1)
    alone: dict[Case, list[Error]] = {}
    for case, errors in zip(cases, over_ranks(cp, cases)):
        key = replace(case, method="p2p", balance="zigzag", ulysses=2)
        if key not in alone:
            alone[key] = single.errors(key)
        for name, error, one in zip(NAMES, errors, alone[key]):
            assert error.largest <= one.largest + 2e-6, f"{name} of {case} at cp {cp}: {error}, one device {one}"


@pytest.mark.parametrize("documents,cps", [(((256,),), (2, 4, 8)), (((1280,),), (2,))])
def test_bf16_error_does_not_grow_with_the_ring(documents, cps):
    """Partial results are merged in fp32, gradients travel in fp32. 1280: blocks that the kernel does in bf16.

    The norm of the error is bounded; its largest element, a matter of one rounding, only where the kernel gives fp32.
    """
    base = Case(documents=documents, heads=4, kv_heads=2, dtype=torch.bfloat16)
    alone = Runner(0, 1).errors(base)
    for cp in cps:
        methods = [base, replace(base, method="all_gather"), replace(base, method="a2a")]
        methods += [replace(base, method="a2a+p2p")] if cp == 4 else []
        methods = [m for m in methods if m.method != "a2a" or cp <= base.heads]
        for case, errors in zip(methods, over_ranks(cp, methods)):
            for name, error, one in zip(NAMES, errors, alone):
                assert error.squares <= 1.5**2 * one.squares, f"{name} of {case.method} at cp {cp}: {error}, {one}"
                if documents == ((256,),) and case.method in ("p2p", "all_gather"):
                    assert error.largest <= 1.5 * one.largest, f"{name} of {case.method} at cp {cp}: {error}, {one}"


@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_large_scores_stay_finite(dtype, bound):
    """Scores times 50."""
    cases = [Case(m, documents=((256,),), dtype=dtype, gain=50.0) for m in ("p2p", "a2a", "all_gather")]
    for case, errors in zip(cases, over_ranks(4, cases)):
        for name, error in zip(NAMES, errors):
            assert error.largest <= bound * error.scale, f"{name} of {case}: {error}"


def independent(rank: int, world: int, cases: list[Case]) -> list[tuple[bool, int]]:
    """Does another first document leave the others' results bitwise as they are? And how many tokens are these."""
    runner, same = Runner(rank, world), []
    for case in cases:
        plan, results = runner.plan(case), []
        first = case.documents[0][0]
        mine = torch.from_numpy(plan.source_index(rank))[0]
        for change in (0.0, 3.0):
            (q, k, v, dout), _ = runner.local(replace(case))
            torch.manual_seed(5)
            noise = [torch.randn(x.shape[1:]) for x in (q, k, v)]
            touched = ((mine >= 0) & (mine < first))[:, None, None]
            q, k, v = (
                torch.where(mine[:, None, None] < 0, 0, x + change * n * touched) for x, n in zip((q, k, v), noise)
            )
            for x in (q, k, v):
                x.requires_grad_()
            out = runner.attention(case)(q, k, v, plan, case.window)
            out.backward(dout)
            results.append([x[:, mine >= first] for x in (out, q.grad, k.grad, v.grad)])
        same.append((all(torch.equal(a, b) for a, b in zip(*results)), int((mine >= first).sum())))
    return same


def test_packed_documents_do_not_see_each_other():
    methods = ["p2p", "a2a", "all_gather", "a2a+p2p"]
    cases = [Case(m, 8, 2, ((11, 40, 3), (17,)), True, w) for m in methods for w in (None, 6)]
    for by_rank in zip(*run_ranks(4, independent, 4, cases)):
        assert all(same for same, _ in by_rank)
        assert sum(count for _, count in by_rank) == 40 + 3 + 17


def deterministic(rank: int, world: int) -> bool:
    runner = Runner(rank, world)
    equal = True
    for method in ("p2p", "all_gather", "a2a", "a2a+p2p"):
        case = Case(method, 8, 2, ((77,), (20,)))
        torch.manual_seed(rank)
        first = runner.run(case)
        torch.manual_seed(rank)
        equal &= all(torch.equal(a, b) for a, b in zip(first, runner.run(case)))
    return equal


def test_deterministic():
    assert all(run_ranks(4, deterministic, 4))
