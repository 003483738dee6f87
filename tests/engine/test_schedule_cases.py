"""Schedules where they broke elsewhere: frozen parts, layers that do not divide, one batch in any micro-batches.

Letters and numbers (P03, P05, P10, P13, P15) are cases of a list of failures seen elsewhere.
"""

from __future__ import annotations

import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybrid5d.parallel.context import Axis
from hybrid5d.parallel.messages import Inbox, send
from tests.engine.test_schedules import layout
from tests.engine_kit import Job, Layout, build_engine, compare, train_runs
from tests.harness import run_ranks
from tests.kit import MODELS, Recipe, hf_model, make_rows, reference, save_model, step_batch

CLIP = Recipe(lr=0.5, clip=0.3)
SPLIT = ("zb-h1", "zbv")
STEPS = [make_rows(4, 16, 101, seed=s) for s in (1, 2)]
FROZEN = {
    "all but norms": ["*proj*", "*embed*", "lm_head*"],
    "the embedding": ["*embed*"],
    "a stage": ["*embed*", "model.layers.[01].*"],
}


def test_frozen_parts_stay_bitwise_and_the_rest_learns(folders: dict[str, Path]) -> None:
    """P03: what is no product got its gradient in neither half. P05: stage 0 without an input gradient skipped W."""
    runs, wanted, cases = [], [], []
    for what, patterns in FROZEN.items():
        model = hf_model(MODELS["llama"])
        for name, p in model.named_parameters():
            p.requires_grad_(not any(fnmatchcase(name, pattern) for pattern in patterns))
        want = reference(model, STEPS, CLIP)
        for schedule in SPLIT:
            lay = layout(schedule, pp=2, extra={"freeze_parameters": patterns})
            runs.append((lay, Job(str(folders["llama"]), CLIP, STEPS)))
            wanted.append(want)
            cases.append(f"{what}, {schedule}")
    before = {n: p.detach().numpy() for n, p in hf_model(MODELS["llama"]).named_parameters()}
    for case, want, got, (lay, _) in zip(cases, wanted, train_runs(runs), runs):
        try:
            compare(got, want)
        except AssertionError as exc:
            raise AssertionError(f"{case}: {exc}") from None
        frozen = [n for n in before if any(fnmatchcase(n, p) for p in lay.extra["freeze_parameters"])]
        assert frozen and all(np.array_equal(got.weights[n], before[n]) for n in frozen), case


@pytest.mark.parametrize(
    ("layers", "schedule", "model"),
    [
        (5, "interleaved", {}),
        (7, "interleaved", {"virtual_pipeline_model_parallel_size": 3}),
        (3, "interleaved", {}),
        (2, "zbv", {}),  # embedding and head in chunks without a layer
        (5, "zbv", {"pipeline_partition": "cost"}),
    ],
)
def test_layers_that_do_not_divide(layers: int, schedule: str, model: dict[str, Any], tmp_path: Path) -> None:
    """P13: 80 layers on 16 x 2 stages trained 64 of them; chunks without layers; every layer once, by its name."""
    config = {**MODELS["llama"], "num_hidden_layers": layers}
    folder = str(save_model(config, tmp_path / "m"))
    want = reference(hf_model(config), STEPS, CLIP)
    (got,) = train_runs([(layout(schedule, pp=2, model=model), Job(folder, CLIP, STEPS))])
    assert {n for n in got.weights if ".layers." in n} == {n for n in want.weights if ".layers." in n}
    compare(got, want)


def _one_batch(rank: int, cases: list[Layout], folder: str, rows: list[Any]) -> list[tuple[float, float, float]]:
    """(evaluated loss, training loss, norm) of the same rows and weights."""
    found = []
    for lay in cases:
        engine = build_engine(lay, CLIP, folder, len(rows))
        batch = step_batch(rows, 1, 0, lay.micro)
        loss = engine.eval_batch(batch).loss
        result = engine.train_batch(batch)
        found.append((loss, result.loss, result.grad_norm))
    return found


def test_one_batch_in_any_micro_batches_and_in_evaluation(folders: dict[str, Path]) -> None:
    """P15: a division by the number of micro-batches inside the schedule; a loss scaled in place before it is said."""
    rows = make_rows(8, 16, 101, seed=3)
    want = reference(hf_model(MODELS["llama"]), [rows], CLIP)
    cases = [layout(s, pp=2, micro=micro) for s in ("interleaved", *SPLIT) for micro in (8, 4, 1)]
    for per_rank in run_ranks(2, _one_batch, cases, str(folders["llama"]), rows):
        for lay, found in zip(cases, per_rank):
            assert found == pytest.approx((want.losses[0], want.losses[0], want.norms[0]), rel=1e-5), str(lay)


def _late(rank: int, count: int) -> list[float]:
    """Rank 0 sends tensors that it holds no longer and fills its memory again; rank 1 looks late."""
    axis = Axis.of(None)
    if rank == 0:
        sent = []
        for i in range(count):
            sent.append(send(axis, 1, torch.full((4096,), float(i))))
            torch.full((4096,), -1.0)  # would be given the memory of a tensor that nobody holds
        for pending in sent:
            pending.wait()
        return []
    inbox = Inbox(axis, 0, [(i, (4096,)) for i in range(count)], torch.float32, torch.device("cpu"))
    time.sleep(0.3)
    order = [*range(1, count), 0]  # asked for in another order than sent
    got = {i: inbox.take(i) for i in order}
    assert all((x == x[0]).all() for x in got.values())
    return [float(got[i][0]) for i in range(count)]


def test_a_sent_tensor_is_kept_and_messages_are_matched_by_name() -> None:
    """P10: the receiver got what was written into the buffer later. P09, P11: matched by arrival, not by what it is."""
    assert run_ranks(2, _late, 8, backend="gloo")[1] == [float(i) for i in range(8)]
    assert run_ranks(2, _late, 8, backend="shm")[1] == [float(i) for i in range(8)]
