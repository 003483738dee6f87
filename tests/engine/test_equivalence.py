"""The one rule: every layout trains exactly as HF transformers does in one process.

Tiny awkward models (random norm weights, biases, odd vocabulary, kv heads below tp, tied and untied), ragged rows, a
micro-batch without a single label; SGD without clipping, SGD with clipping that acts, AdamW. Per run: loss of each
step, norm before clipping, every parameter's first gradient by HF name, every weight after the last step, copies
bitwise equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.engine_kit import Job, Layout, compare, train_layout
from tests.kit import MODELS, Recipe, Trace, hf_model, make_packed_rows, make_rows, reference
from tests.layouts import RECIPES, SCHEDULES, Case, axes, cases, recipe_of, rows_per_batch

LENGTH = 24


def steps_of(batch: int, recipe: Recipe, packing: str = "none") -> list:
    make = make_rows if packing == "none" else make_packed_rows
    return [make(batch, LENGTH, 101, seed=s + 1) for s in range(recipe.steps)]


@cache
def wanted(model: str, recipe: Recipe, batch: int, packing: str) -> Trace:
    return reference(hf_model(MODELS[model]), steps_of(batch, recipe, packing), recipe)


def check(
    layout: Layout, folders: dict[str, Path], runs: Sequence[tuple[str, str]], backend: str | None = None
) -> None:
    """Train each (model, recipe) in the layout and compare it with one process."""
    batch = rows_per_batch(layout.dp)
    recipes = [recipe_of(r, layout.precision) for _, r in runs]
    jobs = [Job(str(folders[m]), r, steps_of(batch, r, layout.packing)) for (m, _), r in zip(runs, recipes)]
    for (model, name), recipe, got in zip(runs, recipes, train_layout(layout, jobs, backend=backend)):
        want = wanted(model, recipe, batch, layout.packing)
        assert name != "sgd-clip" or min(want.norms) > recipe.clip, "clipping must act"
        try:
            compare(got, want, layout.precision)
        except AssertionError as exc:
            raise AssertionError(f"{layout}, {model}, {name}: {exc}") from None


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.full)])
@pytest.mark.parametrize("case", cases(2), ids=str)
def test_every_pair_of_choices_equals_one_process(case: Case, folders: dict[str, Path], backend: str) -> None:
    check(case.layout, folders, [(case.model, case.recipe)], backend)


@pytest.mark.full
@pytest.mark.parametrize("case", [c for c in cases(3) if c not in set(cases(2))], ids=str)
def test_every_triple_of_choices_equals_one_process(case: Case, folders: dict[str, Path]) -> None:
    check(case.layout, folders, [(case.model, case.recipe)])


@pytest.mark.full
@pytest.mark.parametrize("layout", axes(), ids=str)
def test_every_layout_equals_one_process(layout: Layout, folders: dict[str, Path]) -> None:
    turn = layout.tp + layout.pp + layout.cp + layout.dp + layout.sp
    recipes = list(RECIPES)
    check(layout, folders, [(name, recipes[(turn + i) % 3]) for i, name in enumerate(("llama", "qwen2", "qwen3"))])


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_five_axes_at_two(schedule: str, folders: dict[str, Path]) -> None:
    """16 ranks: tp 2 with sp, pp 2, cp 2, dp 2, in every pipeline schedule."""
    check(Layout(2, 2, 2, 2, True, model=SCHEDULES[schedule]), folders, [("qwen3", "sgd-clip"), ("llama", "adamw")])


REDUCTION = [
    Layout(2, 2, dp=2, sp=True, extra={"optim": {"overlap_grad_reduce": True}}),
    Layout(2, dp=2, sp=True, zero=2, extra={"optim": {"overlap_grad_reduce": True}}),
    Layout(2, 2, dp=2, sp=True, extra={"megatron": {"ddp_bucket_size": 500}}),
]


@pytest.mark.parametrize("layout", REDUCTION, ids=str)
def test_overlapped_and_bucketed_reduction(layout: Layout, folders: dict[str, Path]) -> None:
    check(layout, folders, [("llama", "sgd-clip"), ("qwen2", "adamw"), ("qwen3", "sgd")])


@pytest.mark.parametrize("layout", [Layout(2, 2, 2, 1, True), Layout(4, sp=True), Layout(2, cp=2)], ids=str)
def test_every_bias_and_mistral(layout: Layout, folders: dict[str, Path]) -> None:
    check(layout, folders, [("llama_bias", "sgd-clip"), ("mistral", "sgd")])
