"""The one rule: every layout trains exactly as HF transformers does in one process.

Tiny awkward models (random norm weights, biases, odd vocabulary, kv heads below tp, tied and untied), ragged rows, a
micro-batch without a single label; SGD without clipping, SGD with clipping that acts, AdamW. Per run: loss of each
step, norm before clipping, every parameter's first gradient by HF name, every weight after the last step, copies
bitwise equal.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.engine_kit import Job, Layout, compare, train_layout
from tests.kit import MODELS, Recipe, Trace, hf_model, make_rows, reference

RECIPES = {
    "sgd": Recipe(lr=0.5),
    "sgd-clip": Recipe(lr=0.5, clip=0.4),
    "adamw": Recipe("adamw", lr=1e-2, eps=1e-3, weight_decay=0.1, clip=1.0),
}
NAMES = ("llama", "qwen2", "qwen3")
LENGTH = 24


def steps_of(batch: int, recipe: Recipe) -> list:
    return [make_rows(batch, LENGTH, 101, seed=s) for s in range(recipe.steps)]


@cache
def wanted(model: str, recipe: str, batch: int) -> Trace:
    chosen = RECIPES[recipe]
    return reference(hf_model(MODELS[model]), steps_of(batch, chosen), chosen)


def layouts() -> list[Layout]:
    """Every (tp, pp, cp, dp, sp) of up to 8 ranks that 4 heads and 4 layers allow.

    Two rows a micro-batch where they fit; test_cases.py has one.
    """
    found = []
    for tp in (1, 2, 4):
        for pp in range(1, 7):
            for cp in range(1, 9):
                for dp in range(1, 9):
                    if tp * pp * cp * dp <= 8:
                        micro = 2 if 8 % (2 * dp) == 0 else 1
                        found += [Layout(tp, pp, cp, dp, sp, micro) for sp in ((False, True) if tp > 1 else (False,))]
    return found


def batch_of(layout: Layout) -> int:
    return 8 if 8 % layout.dp == 0 else 2 * layout.dp


def check(layout: Layout, folders: dict[str, Path], pairs: list[tuple[str, str]], **bounds: float) -> None:
    batch = batch_of(layout)
    jobs = [Job(str(folders[m]), RECIPES[r], steps_of(batch, RECIPES[r])) for m, r in pairs]
    for (model, recipe), got in zip(pairs, train_layout(layout, jobs)):
        want = wanted(model, recipe, batch)
        assert recipe != "sgd-clip" or min(want.norms) > RECIPES[recipe].clip, "clipping must act"
        try:
            compare(got, want, **bounds)
        except AssertionError as exc:
            raise AssertionError(f"{layout}, {model}, {recipe}: {exc}") from None


@pytest.mark.parametrize("layout", layouts(), ids=str)
def test_layout_equals_one_process(layout: Layout, folders: dict[str, Path]) -> None:
    turn = layout.tp + layout.pp + layout.cp + layout.dp + layout.sp
    recipes = list(RECIPES)
    check(layout, folders, [(name, recipes[(turn + i) % 3]) for i, name in enumerate(NAMES)])


def test_five_axes_at_two(folders: dict[str, Path]) -> None:
    """16 ranks: tp 2 with sp, pp 2, cp 2, dp 2."""
    check(Layout(2, 2, 2, 2, True), folders, [("qwen3", "sgd-clip"), ("llama", "adamw")])


VARIANTS = [
    Layout(zero=0, tp=2, pp=2, sp=True),
    Layout(zero=0, dp=2, cp=2),
    Layout(zero=2, tp=2, dp=2, sp=True),
    Layout(zero=2, cp=2, dp=2),
    Layout(zero=3, tp=2, dp=2, sp=True),
    Layout(zero=3, tp=4, sp=True),
    Layout(zero=3, cp=2, dp=2, micro=2),
    Layout(micro=4, pp=2, cp=2),
    Layout(micro=2, tp=2, pp=2, cp=2, sp=True),
    Layout(micro=2, dp=2, pp=2, tp=2),
    Layout(2, 2, dp=2, sp=True, extra={"optim": {"overlap_grad_reduce": True}}),
    Layout(2, dp=2, sp=True, zero=2, extra={"optim": {"overlap_grad_reduce": True}}),
    Layout(2, 2, dp=2, sp=True, extra={"megatron": {"ddp_bucket_size": 500}}),
]


@pytest.mark.parametrize("layout", VARIANTS, ids=str)
def test_zero_stages_and_micro_batch_sizes(layout: Layout, folders: dict[str, Path]) -> None:
    check(layout, folders, [("llama", "sgd-clip"), ("qwen2", "adamw"), ("qwen3", "sgd")])


@pytest.mark.parametrize("layout", [Layout(2, 2, 2, 1, True), Layout(4, sp=True), Layout(2, cp=2)], ids=str)
def test_every_bias_and_mistral(layout: Layout, folders: dict[str, Path]) -> None:
    check(layout, folders, [("llama_bias", "sgd-clip"), ("mistral", "sgd")])
