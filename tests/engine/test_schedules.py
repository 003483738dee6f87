"""Every schedule trains as one process does, whatever the number of micro-batches, stages and layers.

Letters and numbers (P01-P16) are cases of a list of failures seen elsewhere; each test says what goes wrong there.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.engine_kit import Job, Layout, compare, train_runs
from tests.kit import MODELS, Recipe, Trace, hf_model, make_rows, reference
from tests.layouts import RECIPES, SCHEDULES

LENGTH = 16


@cache
def steps_of(sizes: tuple[int, ...], seed: int = 0) -> list:
    """A step of each size, rows of unlike lengths."""
    return [make_rows(size, LENGTH, 101, seed=seed + i + 1) for i, size in enumerate(sizes)]


@cache
def wanted(model: str, recipe: Recipe, sizes: tuple[int, ...]) -> Trace:
    return reference(hf_model(MODELS[model]), steps_of(sizes), recipe)


def check(runs: list[tuple[Layout, str, str, tuple[int, ...]]], folders: dict[str, Path]) -> None:
    """Each (layout, model, recipe, rows of each step); rows are micro-batches of `layout.micro`."""
    recipes = [RECIPES[name] for _, _, name, _ in runs]
    jobs = [(lay, Job(str(folders[m]), r, steps_of(s))) for (lay, m, _, s), r in zip(runs, recipes)]
    for (layout, model, name, sizes), recipe, got in zip(runs, recipes, train_runs(jobs)):
        try:
            compare(got, wanted(model, recipe, sizes))
        except AssertionError as exc:
            raise AssertionError(f"{layout}, {model}, {name}, {sizes}: {exc}") from None


def layout(schedule: str, **changes: object) -> Layout:
    model = {**SCHEDULES[schedule], **changes.pop("model", {})}  # type: ignore[dict-item]
    return Layout(model=model, **changes)  # type: ignore[arg-type]


SPLIT = [name for name in SCHEDULES if name not in ("1f1b", "wide")]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_number_of_micro_batches_another_one_each_step(schedule: str, folders: dict[str, Path]) -> None:
    """P04 (the first or the last W alone counts), P08, P11 (unlike shapes), P12 (m below p, no multiple)."""
    check(
        [
            (layout(schedule, pp=2), "llama_bias", "sgd", (4, 1, 7)),
            (layout(schedule, pp=2), "qwen3", "sgd-clip", (5, 2, 3)),  # tied: P01
            (layout(schedule, pp=2, zero=0), "qwen2", "adamw", (8, 3, 8)),
        ],
        folders,
    )


@pytest.mark.full
@pytest.mark.parametrize("schedule", SPLIT)
def test_with_the_other_axes_recomputation_and_uneven_stages(schedule: str, folders: dict[str, Path]) -> None:
    """P05 (p 1 has no stage before it), P14 (one norm over chunks and axes, clipped), P15."""
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    two = [layout(schedule, **axes) for axes in ({"tp": 2, "sp": True}, {"cp": 2}, {"dp": 2}, {"pp": 2, "model": full})]
    two.append(layout(schedule, pp=2, model={"pipeline_partition": "cost"}))
    models, names = ("qwen2", "llama_bias", "qwen3", "llama3", "qwen3"), ("sgd-clip", "sgd", "adamw", "sgd-clip", "sgd")
    check([(lay, m, n, (4, 2)) for lay, m, n in zip(two, models, names)], folders)
    axes_of_four = ({"tp": 2, "pp": 2, "sp": True, "model": full}, {"pp": 2, "cp": 2}, {"pp": 2, "dp": 2})
    four = [layout(schedule, **axes) for axes in axes_of_four]
    if SCHEDULES[schedule]["pipeline_schedule"] in ("gpipe", "zb-h1"):
        four.append(layout(schedule, pp=4))
    check([(lay, m, n, (4, 2)) for lay, m, n in zip(four, models, names)], folders)
