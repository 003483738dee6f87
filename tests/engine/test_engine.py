"""Calls of the engine: what the caller has set in torch, and what is no batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybrid5d.data.types import StepBatch
from hybrid5d.errors import DataError
from tests.engine_kit import Layout, build_engine
from tests.harness import run_ranks
from tests.kit import MODELS, Recipe, hf_model, make_rows, reference, step_batch

SGD = Recipe(lr=0.5, steps=2)


@contextlib.contextmanager
def _bf16_default() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
        assert torch.get_default_dtype() == torch.bfloat16, "the caller's setting is left as it was"
    finally:
        torch.set_default_dtype(torch.float32)


def _mode(name: str) -> Any:
    if name == "autocast":
        return torch.autocast("cpu", dtype=torch.bfloat16)
    return {"no_grad": torch.no_grad, "inference": torch.inference_mode, "bf16 default": _bf16_default}[name]()


def _under_a_mode(rank: int, layout: Layout, folder: str, mode: str) -> Any:
    rows = make_rows(4, 16, 101)
    with _mode(mode):
        engine = build_engine(layout, SGD, folder, 4)
        batch = step_batch(rows, layout.dp, engine.ctx.dp.rank, 1)
        before = engine.eval_batch(batch)
        steps = [engine.train_batch(batch) for _ in range(2)]
        logprobs = engine.compute_logprobs(rows)
    return before, steps, logprobs


@pytest.mark.parametrize("mode", ["no_grad", "inference", "autocast", "bf16 default"])
@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2, sp=True), Layout(dp=2, zero=3)], ids=str)
def test_torch_modes_of_the_caller_change_nothing(layout: Layout, mode: str, folders: dict[str, Path]) -> None:
    rows = make_rows(4, 16, 101)
    model = hf_model(MODELS["qwen3"])
    want = reference(model, [rows, rows], SGD)
    with torch.no_grad():
        outputs = [torch.log_softmax(model(torch.from_numpy(d.input_ids)[None]).logits[0], -1) for d in rows]
    for before, steps, logprobs in run_ranks(layout.world, _under_a_mode, layout, str(folders["qwen3"]), mode):
        assert [before.loss, steps[1].loss] == pytest.approx(want.losses, abs=1e-5)
        assert [s.grad_norm for s in steps] == pytest.approx(want.norms, rel=1e-5)
        assert (before.valid_tokens, before.tokens) == (steps[0].valid_tokens, steps[0].tokens)
        for d, out, got in zip(rows, outputs, logprobs, strict=True):
            picked = out.gather(-1, torch.from_numpy(d.labels).clamp(min=0)[:, None])[:, 0].numpy()
            np.testing.assert_allclose(got.logprobs, picked * (d.labels >= 0), atol=1e-4)


GOOD = make_rows(1, 8, 101)[0]
BAD_BATCHES: dict[str, tuple[Any, ...]] = {
    "a step without micro-batches": (),
    "a micro-batch without a row, or a row without a token": ((),),
    "a micro-batch without a row, or a row without a token ": (((),),),
    "a row is a Document; write a tuple of documents": ((GOOD,),),
    "row 9: input_ids must be a numpy array [n] of integers, not a list": (
        ((replace(GOOD, row_id=9, input_ids=list(GOOD.input_ids)),),),
    ),
    "row 9: labels must be a numpy array [n] of integers, not a Tensor": (
        ((replace(GOOD, row_id=9, labels=torch.from_numpy(GOOD.labels)),),),
    ),
    "row 9: 3 position_ids for": (((replace(GOOD, row_id=9, position_ids=np.arange(3)),),),),
}


def _bad_batches(rank: int, layout: Layout, folder: str, first: bool) -> list[str]:
    engine = build_engine(layout, SGD, folder, 1)
    good = StepBatch((((GOOD,),),), (0,))
    if not first:
        engine.train_batch(good)
    found = []
    for micro_batches in BAD_BATCHES.values():
        bad = StepBatch(micro_batches, ())
        for call in (engine.train_batch, engine.eval_batch)[: 2 if micro_batches else 1]:
            with pytest.raises(DataError) as caught:
                call(bad)
            found.append(str(caught.value))
    with pytest.raises(DataError, match="row 1: labels must be"):
        engine.compute_logprobs([GOOD, replace(GOOD, labels=list(GOOD.labels))])
    result = engine.train_batch(good)
    assert (result.step, engine.global_step) == ((1, 1) if first else (2, 2))
    return found


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
def test_what_is_no_batch_is_refused_on_every_rank(layout: Layout, first: bool, folders: dict[str, Path]) -> None:
    messages = [m.strip() for m, batch in BAD_BATCHES.items() for _ in range(2 if batch else 1)]
    for found in run_ranks(layout.world, _bad_batches, layout, str(folders["llama"]), first):
        for message, text in zip(messages, found, strict=True):
            assert message in text and "\n" not in text, text


def _one_empty(rank: int, layout: Layout, folder: str) -> str:
    engine = build_engine(layout, SGD, folder, 2)
    with pytest.raises(DataError) as caught:
        engine.train_batch(StepBatch((((GOOD,),),) if engine.ctx.dp.rank else (), (0,)))
    return str(caught.value)


def test_a_dp_rank_without_rows_stops_all(folders: dict[str, Path]) -> None:
    for text in run_ranks(2, _one_empty, Layout(dp=2), str(folders["llama"])):
        assert "different numbers of micro-batches: [0, 1]" in text


def _other_positions(rank: int, layout: Layout, folder: str) -> str:
    engine = build_engine(layout, SGD, folder, 1)
    document = replace(GOOD, position_ids=np.arange(len(GOOD)) + rank)
    with pytest.raises(DataError) as caught:
        engine.train_batch(StepBatch((((document,),),), (0,)))
    return str(caught.value)


def test_peers_given_other_positions(folders: dict[str, Path]) -> None:
    for text in run_ranks(2, _other_positions, Layout(tp=2), str(folders["llama"])):
        assert "ranks [0] and [1] belong to dp rank 0 but were given different rows" in text
