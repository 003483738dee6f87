"""Every context-parallel method against full attention in fp64, forward and all gradients."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.dist.attention_cases import Case, Runner
from tests.harness import run_ranks

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


def errors_of(rank: int, world: int, cases: list[Case]) -> list[list[float]]:
    runner = Runner(rank, world)
    return [runner.errors(case) for case in cases]


def worst(world: int, cases: list[Case]) -> list[list[float]]:
    """Per case the errors of out, dq, dk, dv, the largest over the ranks."""
    by_rank = run_ranks(world, errors_of, world, cases, timeout=150)
    return [[max(e) for e in zip(*ranks)] for ranks in zip(*by_rank)]


@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
def test_equals_full_attention(cp):
    cases = matrix(cp)
    single = Runner(0, 1)
    alone: dict[Case, list[float]] = {}
    for case, errors in zip(cases, worst(cp, cases)):
        key = replace(case, method="p2p", balance="zigzag", ulysses=2)
        if key not in alone:
            alone[key] = single.errors(key)
        for name, error, bound in zip(("out", "dq", "dk", "dv"), errors, alone[key]):
            assert error <= bound + 2e-6, f"{name} of {case} at cp {cp}: error {error:.2e}, one device {bound:.2e}"


@pytest.mark.parametrize("documents,cps", [(((256,),), (2, 4, 8)), (((2048,),), (2,))])
def test_bf16_error_does_not_grow_with_the_ring(documents, cps):
    """N20: partial results are merged in fp32, gradients travel in fp32. 2048: blocks that the kernel does in bf16."""
    base = Case(documents=documents, heads=4, kv_heads=2, dtype=torch.bfloat16)
    alone = Runner(0, 1).errors(base)
    for cp in cps:
        methods = [base, replace(base, method="all_gather"), replace(base, method="a2a")]
        methods += [replace(base, method="a2a+p2p")] if cp > 2 else []
        for case, errors in zip(methods, worst(cp, methods)):
            for name, error, bound in zip(("out", "dq", "dk", "dv"), errors, alone):
                assert error <= 1.5 * bound, f"{name} of {case.method} at cp {cp}: {error:.4f}, one device {bound:.4f}"


def test_large_scores_stay_finite():
    """N20, second case: scores times 50."""
    for dtype in (torch.float32, torch.bfloat16):
        cases = [Case(m, documents=((256,),), dtype=dtype, gain=50.0) for m in ("p2p", "a2a", "all_gather")]
        alone = Runner(0, 1).errors(cases[0])
        for case, errors in zip(cases, worst(4, cases)):
            for name, error, bound in zip(("out", "dq", "dk", "dv"), errors, alone):
                assert error <= 1.5 * bound + 2e-6, f"{name} of {case}: {error}, one device {bound}"


def independent(rank: int, world: int, cases: list[Case]) -> list[bool]:
    """Does another first document leave the results of the others bitwise as they are?"""
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
        same.append(all(torch.equal(a, b) for a, b in zip(*results)))
    return same


def test_packed_documents_do_not_see_each_other():
    methods = ["p2p", "a2a", "all_gather", "a2a+p2p"]
    cases = [Case(m, 8, 2, ((11, 40, 3), (17,)), True, w) for m in methods for w in (None, 6)]
    assert all(all(same) for same in run_ranks(4, independent, 4, cases))


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
