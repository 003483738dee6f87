"""Checkpoints: any layout to any layout, equal to the unbroken run; atomic; faults are one line on every rank."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid5d.data.types import Document
from tests.engine_kit import Layout, Shards, assemble, build_engine, relative, shards
from tests.harness import RankFailure, run_ranks
from tests.kit import MODELS, Recipe, make_rows, save_model, step_batch

ADAM = Recipe("adam", lr=1e-3, clip=0.5, weight_decay=0.1, eps=1e-6, steps=4)
SGD = Recipe("sgd", lr=0.1, steps=4)
STEPS = [make_rows(8, 20, 101, seed) for seed in range(4)]


def _state_of(engine: Any) -> dict[str, Shards]:
    """Every master and moment this rank holds whole, by kind."""
    from hybrid5d.engine.optimizer_state import OptimizerState

    access = OptimizerState(engine.ds.optimizer, engine.ctx.dp_cp)
    found: dict[str, Shards] = {}
    for kind in ("weight", *access.moments()):
        values = {}
        for p in engine.module.parameters():
            if getattr(p, "pieces", ()) and (p.requires_grad or kind == "weight"):
                whole = access.gather(p, kind, 0)
                values[p] = None if whole is None else whole.reshape(getattr(p, "ds_shape", p.shape))
        found[kind] = shards(engine.module, values.get) if engine.ctx.dp_cp.rank == 0 else []
    return found


def _run(
    rank: int, layout: Layout, recipe: Recipe, folder: str, resume: str | None, steps: range, save: str | None
) -> dict[str, Any]:
    engine = build_engine(layout, recipe, folder, len(STEPS[0]))
    given = engine.load_checkpoint(resume) if resume else None
    assert engine.global_step == steps.start
    results = []
    for k in steps:
        results.append(engine.train_batch(step_batch(STEPS[k], layout.dp, engine.ctx.dp.rank, layout.micro)))
    if save:
        engine.save_checkpoint(save, {"epoch": 3, "rows": [1, 2]})
    return {"losses": [(r.step, r.loss, r.grad_norm, r.lr) for r in results], "state": _state_of(engine), "given": given}


def run(layout: Layout, recipe: Recipe, folder: Path, steps: range, resume: Any = None, save: Any = None) -> Any:
    """Train `steps` in a layout; returns per-step numbers, full tensors by kind and name, and the restored caller state."""
    ranks = run_ranks(
        layout.world, _run, layout, recipe, str(folder), resume and str(resume), steps, save and str(save), timeout=200
    )
    kinds = ranks[0]["state"]
    state = {kind: assemble([r["state"][kind] for r in ranks]) for kind in kinds}
    return ranks[0]["losses"], state, ranks[0]["given"]


def same(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    """Numbers per step and every tensor of every kind agree."""
    np.testing.assert_allclose(got[0], want[0], rtol=tolerance, atol=tolerance)
    assert got[1].keys() == want[1].keys()
    for kind in want[1]:
        assert got[1][kind].keys() == want[1][kind].keys()
        far = {n: relative(t, want[1][kind][n]) for n, t in got[1][kind].items()}
        assert max(far.values()) <= tolerance, (kind, {n: d for n, d in far.items() if d > tolerance})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied Qwen3 with kv heads < tp 4, odd vocabulary."""
    return save_model(MODELS["qwen3"], tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def unbroken(model: Path) -> Any:
    """Four steps in one process."""
    return run(Layout(), ADAM, model, range(4))


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps at tp2 pp2 dp2, then a checkpoint."""
    root = tmp_path_factory.mktemp("saved")
    run(Layout(tp=2, pp=2, dp=2, sp=True), ADAM, model, range(2), save=root)
    return root


TARGETS = [
    Layout(tp=2, pp=2, dp=2, sp=True),
    Layout(),
    Layout(pp=4),
    Layout(tp=4),
    Layout(dp=2),
    Layout(cp=2, dp=2),
    Layout(tp=2, dp=2, zero=2),
    Layout(tp=2, dp=2, zero=3),
]


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_any_layout_goes_on_from_any_other(model: Path, saved: Path, unbroken: Any, target: Layout) -> None:
    got = run(target, ADAM, model, range(2, 4), resume=saved)
    same(got, (unbroken[0][2:], unbroken[1]))
    assert got[2] == {"epoch": 3, "rows": [1, 2]}


SOURCES = [Layout(), Layout(tp=4, dp=2), Layout(cp=2, dp=2), Layout(pp=2, zero=0), Layout(dp=4, zero=2), Layout(dp=2, zero=3)]


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_every_layout_writes_what_others_read(model: Path, unbroken: Any, tmp_path: Path, source: Layout) -> None:
    run(source, ADAM, model, range(2), save=tmp_path)
    same(run(Layout(tp=2, pp=2), ADAM, model, range(2, 4), resume=tmp_path), (unbroken[0][2:], unbroken[1]))
