"""Evaluation sums and log-probabilities of tokens, equal to one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybrid5d.data.types import IGNORE_INDEX, Document, StepBatch
from tests.engine_kit import Layout, build_engine
from tests.harness import run_ranks
from tests.kit import (
    MODELS,
    Recipe,
    document_loss_sum,
    hf_model,
    make_rows,
    reference,
    step_batch,
)

SGD = Recipe(lr=0.5)


def _eval_rank(rank: int, layout: Layout, folder: str, rows: list[Document], held_out: list[Document]) -> Any:
    engine = build_engine(layout, SGD, folder, len(rows))
    at = engine.ctx.dp.rank
    mine = held_out[at :: layout.dp]
    count = -(-len(held_out) // layout.dp)
    dummy = Document(np.zeros(1, np.int64), np.full(1, IGNORE_INDEX, np.int64), -1)
    mine = mine + [dummy] * (count - len(mine))
    batch = StepBatch(tuple(((d,),) for d in mine), tuple(d.row_id for d in held_out))
    before = engine.eval_batch(batch)
    first = engine.train_batch(step_batch(rows, layout.dp, at, layout.micro))
    again = engine.eval_batch(batch)
    second = engine.train_batch(step_batch(rows, layout.dp, at, layout.micro))
    return before, again, [first.loss, second.loss], [first.tokens, first.valid_tokens]


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tp=2, sp=True), Layout(cp=2), Layout(pp=2), Layout(dp=2), Layout(zero=3, dp=2)], ids=str
)
@pytest.mark.parametrize("count", [3, *(pytest.param(n, marks=pytest.mark.full) for n in (0, 5))])
def test_evaluation_gives_exact_sums_and_disturbs_nothing(layout: Layout, count: int, folders: dict[str, Path]) -> None:
    """0, 3 and 5 rows of other lengths than training's: exact sums; training goes on as if nothing had happened."""
    rows = make_rows(8, 16, 101)
    held_out = make_rows(count, 23, 101, seed=9)
    model = hf_model(MODELS["qwen3"])
    with torch.no_grad():
        total = float(sum(document_loss_sum(model, d) for d in held_out))
    valid = sum(int((d.labels >= 0).sum()) for d in held_out)
    want = reference(model, [rows, rows], SGD)
    for before, _, losses, counts in run_ranks(layout.world, _eval_rank, layout, str(folders["qwen3"]), rows, held_out):
        assert before.valid_tokens == valid and before.step == 0
        assert abs(before.loss * valid - total) <= 1e-5 * max(valid, 1)
        np.testing.assert_allclose(losses, want.losses, atol=1e-5)
        assert counts == [sum(map(len, rows)), sum(int((d.labels >= 0).sum()) for d in rows)]


def _same_rows_rank(rank: int, layout: Layout, folder: str, rows: list[Document]) -> Any:
    engine = build_engine(layout, Recipe(lr=0.0), folder, len(rows))
    batch = step_batch(rows, layout.dp, engine.ctx.dp.rank, layout.micro)
    trained = engine.train_batch(batch)
    lengths = [[sum(map(len, row)) for row in mb] for mb in batch.micro_batches]
    return trained.loss, engine.eval_batch(batch).loss, trained.padding, lengths


@pytest.mark.parametrize("layout", [Layout(micro=2), Layout(pp=2, micro=2), Layout(cp=2), Layout(dp=2)], ids=str)
def test_evaluation_equals_training_loss(layout: Layout, folders: dict[str, Path]) -> None:
    """And padding is counted: rows of a micro-batch are as long as its longest, up to a multiple of 2 cp (zigzag)."""
    results = run_ranks(layout.world, _same_rows_rank, layout, str(folders["llama"]), make_rows(8, 16, 101))
    step = 2 * layout.cp if layout.cp > 1 else 1
    dealt = [lengths for *_, lengths in results[: layout.dp]]  # ranks of one tp, cp and pp place come first
    places = sum(len(mb) * -(-max(mb) // step) * step for lengths in dealt for mb in lengths)
    real = sum(n for lengths in dealt for mb in lengths for n in mb)
    assert layout.dp > 1 or places > real
    for trained, evaluated, padding, _ in results:
        assert abs(trained - evaluated) < 1e-6
        assert padding == pytest.approx(1 - real / places, abs=1e-12)


def _logprob_rank(rank: int, layout: Layout, folder: str, rows: list[Document]) -> Any:
    engine = build_engine(layout, SGD, folder, 8)
    return [(r.logprobs, r.entropy) for r in engine.compute_logprobs(rows, micro_batch_size=2)]


LOGPROBS = [
    Layout(),
    Layout(tp=4),
    Layout(2, 2, 2, 1, True),
    Layout(cp=4),
    Layout(dp=2, cp=2),
    Layout(pp=2, dp=2),
    Layout(cp=2, model={"cp_comm_type": "a2a"}),
]


@pytest.mark.parametrize("layout", LOGPROBS, ids=str)
def test_logprobs_in_natural_order(layout: Layout, folders: dict[str, Path]) -> None:
    """5 rows of different lengths over any layout: every rank gets log-probability and entropy per token."""
    rows = make_rows(5, 21, 101, seed=3)
    model = hf_model(MODELS["qwen3"])
    wanted = []
    with torch.no_grad():
        for d in rows:
            log = torch.log_softmax(model(torch.from_numpy(d.input_ids)[None]).logits[0].double(), -1)
            labels = torch.from_numpy(d.labels)
            picked = log.gather(-1, labels.clamp(min=0)[:, None])[:, 0] * (labels >= 0)
            wanted.append((picked.numpy(), -(log.exp() * log).sum(-1).numpy()))
    for results in run_ranks(layout.world, _logprob_rank, layout, str(folders["qwen3"]), rows):
        for (logprobs, entropy), (p, e) in zip(results, wanted, strict=True):
            np.testing.assert_allclose(logprobs, p, atol=1e-5)
            np.testing.assert_allclose(entropy, e, atol=1e-5)
