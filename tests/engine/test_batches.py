"""What a step is given: batches cut in any way, labels in any place, positions, lengths."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybrid5d.data.types import IGNORE_INDEX, Document
from tests.engine_kit import Job, Layout, build_engine, compare, shards, train_layout
from tests.harness import RankFailure, run_ranks
from tests.kit import (
    MODELS,
    Recipe,
    document_loss_sum,
    hf_model,
    labelled_row,
    make_rows,
    reference,
    step_batch,
)

SGD = Recipe(lr=0.5)


def one(
    layout: Layout,
    folder: Path,
    steps: list[list[Document]],
    recipe: Recipe = SGD,
    model: str = "llama",
    **bounds: float,
) -> None:
    """Train and compare with the reference."""
    (got,) = train_layout(layout, [Job(str(folder), recipe, steps)])
    compare(got, reference(hf_model(MODELS[model]), steps, recipe), **bounds)


@pytest.mark.parametrize(
    "layout",
    [Layout(micro=8), Layout(micro=1), Layout(dp=2, micro=2), Layout(pp=2, micro=1), Layout(cp=4, micro=2)],
    ids=str,
)
def test_the_mean_is_over_all_tokens_however_the_batch_is_cut(layout: Layout, folders: dict[str, Path]) -> None:
    """57 valid tokens, 1 to 15 a row: the mean is over all of them however the batch is cut."""
    rows = [labelled_row(16, n, i) for i, n in enumerate((1, 2, 3, 5, 8, 10, 13, 15))]
    assert sum(int((d.labels >= 0).sum()) for d in rows) == 57
    one(layout, folders["llama"], [rows], Recipe(lr=0.5, steps=1))


@pytest.mark.parametrize("layout", [Layout(pp=p, micro=m) for p in (1, 2, 4) for m in (2, 8)], ids=str)
def test_updates_do_not_scale_with_stages_or_micro_batches(layout: Layout, folders: dict[str, Path]) -> None:
    one(layout, folders["llama"], [make_rows(8, 16, 101)], Recipe(lr=1.0, steps=1))


@pytest.mark.parametrize("edge", [3, 11])
@pytest.mark.parametrize("layout", [Layout(cp=2), Layout(cp=4), Layout(cp=2, tp=2, sp=True)], ids=str)
def test_the_only_label_is_at_a_chunk_edge(layout: Layout, edge: int, folders: dict[str, Path]) -> None:
    ids = np.random.default_rng(1).integers(0, 101, 16).astype(np.int64)
    labels = np.full(16, IGNORE_INDEX, dtype=np.int64)
    labels[edge] = ids[edge + 1]
    one(layout, folders["llama"], [[Document(ids, labels, 0)]], Recipe(lr=0.5, steps=1))


@pytest.mark.parametrize("layout", [Layout(cp=2), Layout(pp=2), Layout(dp=2), Layout(tp=2, sp=True)], ids=str)
def test_micro_batches_and_shards_without_labels(layout: Layout, folders: dict[str, Path]) -> None:
    """Three of four micro-batches, and the labels of all but one cp rank, are empty."""
    rows = [labelled_row(16, 3 if i == 0 else 0, i) for i in range(4)]
    one(layout, folders["llama"], [rows], Recipe(lr=0.5, steps=1))


def _no_label_rank(rank: int, layout: Layout, folder: str, recipe: Recipe) -> Any:
    engine = build_engine(layout, recipe, folder, 4)
    before = shards(engine.module, lambda p: p)
    rows = [labelled_row(16, 0, i) for i in range(4)]
    result = engine.train_batch(step_batch(rows, layout.dp, engine.ctx.dp.rank, 1))
    after = shards(engine.module, lambda p: p)
    return result.loss, result.grad_norm, all(np.array_equal(a, b) for (_, a), (_, b) in zip(before, after))


@pytest.mark.parametrize("layout", [Layout(cp=2), Layout(pp=2), Layout(dp=2), Layout(tp=2, sp=True, dp=2)], ids=str)
def test_a_batch_without_a_label_changes_nothing(layout: Layout, folders: dict[str, Path]) -> None:
    recipes = (SGD, Recipe("adamw", lr=0.1, clip=1.0))
    for recipe in recipes:
        for loss, norm, unchanged in run_ranks(layout.world, _no_label_rank, layout, str(folders["llama"]), recipe):
            assert (loss, norm, unchanged) == (0.0, 0.0, True)


@pytest.mark.parametrize("layout", [Layout(cp=2), Layout(cp=4), Layout(cp=2, pp=2)], ids=str)
def test_positions_given_by_the_caller(layout: Layout, folders: dict[str, Path]) -> None:
    rows = [replace(d, position_ids=np.arange(len(d)) * 2 + 7) for d in make_rows(4, 16, 101)]
    one(layout, folders["llama"], [rows], Recipe(lr=0.5, steps=1))


@pytest.mark.parametrize("layout", [Layout(pp=2, micro=2), Layout(pp=4), Layout(cp=2, pp=2, micro=2)], ids=str)
def test_lengths_change_in_every_micro_batch(layout: Layout, folders: dict[str, Path]) -> None:
    rng = np.random.default_rng(5)
    steps = []
    for s in range(2):
        lengths = rng.integers(3, 17, 8)
        steps.append(
            [
                replace(make_rows(1, int(n), 101, seed=10 * s + i, ragged=False)[0], row_id=i)
                for i, n in enumerate(lengths)
            ]
        )
    one(layout, folders["llama"], steps, Recipe(lr=0.5, steps=2))


def _micro_mean_rank(rank: int, layout: Layout, folder: str, rows: list[Document]) -> float:
    engine = build_engine(layout, SGD, folder, len(rows))
    return engine.train_batch(step_batch(rows, layout.dp, engine.ctx.dp.rank, layout.micro)).loss


@pytest.mark.parametrize(
    "layout", [Layout(micro=2), Layout(micro=2, cp=2), Layout(micro=2, dp=2), Layout(micro=2, pp=2)], ids=str
)
def test_loss_normalization_by_micro_batch(layout: Layout, folders: dict[str, Path]) -> None:
    """RLinf's averaging: the mean over micro-batches of each one's token mean."""
    rows = [labelled_row(16, n, i) for i, n in enumerate((1, 2, 3, 5, 8, 10, 13, 15))]
    model = hf_model(MODELS["llama"])
    with torch.no_grad():
        sums = [float(document_loss_sum(model, d)) for d in rows]
    valid = [int((d.labels >= 0).sum()) for d in rows]
    want = np.mean([(sums[i] + sums[i + 1]) / (valid[i] + valid[i + 1]) for i in range(0, 8, 2)])
    layout = replace(layout, extra={"loss_normalization": "micro_batch"})
    for loss in run_ranks(layout.world, _micro_mean_rank, layout, str(folders["llama"]), rows):
        assert abs(loss - want) < 1e-5


def _mismatch_rank(rank: int, layout: Layout, folder: str) -> None:
    engine = build_engine(layout, SGD, folder, 4)
    rows = make_rows(4, 16, 101, seed=1 if rank == 1 else 0)
    engine.train_batch(step_batch(rows, layout.dp, engine.ctx.dp.rank, 1))


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(cp=2), Layout(pp=2)], ids=str)
def test_peers_fed_different_rows_are_refused(layout: Layout, folders: dict[str, Path]) -> None:
    with pytest.raises(RankFailure, match="belong to dp rank 0 but were given different rows"):
        run_ranks(layout.world, _mismatch_rank, layout, str(folders["llama"]))
