"""Parameters that need care: tied, frozen, padded, and stages that hold none of the layers."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybrid5d.data.types import Document
from hybrid5d.parallel.shard import pieces_of
from tests.engine_kit import Job, Layout, build_engine, compare, train_layout
from tests.harness import run_ranks
from tests.kit import (
    MODELS,
    Recipe,
    hf_model,
    make_rows,
    reference,
    save_model,
    step_batch,
)

SGD = Recipe(lr=0.5)


@pytest.mark.parametrize(
    "layout", [Layout(pp=2), Layout(pp=4), Layout(pp=2, dp=2, zero=0), Layout(pp=2, tp=2, sp=True)], ids=str
)
def test_tied_matrix_counts_once_in_norm_and_clip(layout: Layout, tmp_path: Path) -> None:
    """All other weights are tiny: the tied matrix is nearly the whole norm; counting both copies is off by sqrt(2)."""
    config = MODELS["qwen2"]

    def scaled() -> Any:
        model = hf_model(config)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name != "model.embed_tokens.weight":
                    p.mul_(0.01)
        return model

    scaled().save_pretrained(tmp_path / "m")
    steps = [make_rows(4, 16, 101, seed=s) for s in range(3)]
    recipe = Recipe(lr=0.5, clip=0.05)
    (got,) = train_layout(layout, [Job(str(tmp_path / "m"), recipe, steps)])
    want = reference(scaled(), steps, recipe)
    assert min(want.norms) > recipe.clip
    # Gradients of q and k are differences of nearly equal numbers here: the fp32 reference itself is up to 2.7e-5 off
    # fp64.
    compare(got, want, grad=6e-5)


@pytest.mark.parametrize("pattern", ["model.embed_tokens.weight", "model.layers.[01].*"])
@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=2, tp=2, sp=True), Layout(zero=2, dp=2)], ids=str)
def test_frozen_parameters_stay_bitwise(layout: Layout, pattern: str, folders: dict[str, Path]) -> None:
    """Frozen weights stay bitwise; norm and the rest equal a reference with the same freeze."""
    patterns = ["model.embed_tokens.weight", pattern] if layout.pp > 1 else [pattern]
    model = hf_model(MODELS["llama"])
    frozen = {n for n, _ in model.named_parameters() if any(fnmatchcase(n, p) for p in patterns)}
    assert frozen
    for name, p in model.named_parameters():
        p.requires_grad_(name not in frozen)
    before = {n: p.detach().numpy().copy() for n, p in model.named_parameters() if n in frozen}
    steps = [make_rows(4, 16, 101, seed=s) for s in range(3)]
    recipe = Recipe(lr=0.5, clip=0.4)
    layout = replace(layout, extra={"freeze_parameters": patterns})
    (got,) = train_layout(layout, [Job(str(folders["llama"]), recipe, steps)])
    compare(got, reference(model, steps, recipe))
    for name, value in before.items():
        assert np.array_equal(got.weights[name], value)


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.full), 1])
@pytest.mark.parametrize(
    "layers,keys",
    [(3, {}), (2, {}), (3, {"decoder_first_pipeline_num_layers": 0}), (4, {"decoder_last_pipeline_num_layers": 0})],
)
def test_a_stage_without_layers(zero: int, layers: int, keys: dict[str, int], tmp_path: Path) -> None:
    """pp 4 with 2 or 3 layers: a stage holds the embedding alone (no norm weight), or norm and head alone."""
    config = {**MODELS["llama"], "num_hidden_layers": layers}
    folder = save_model(config, tmp_path / "m")
    steps = [make_rows(4, 16, 101, seed=s) for s in range(3)]
    recipes = (Recipe(lr=0.5, clip=0.4), Recipe("adamw", lr=1e-2, eps=1e-3, clip=0.4, weight_decay=0.1))
    layout = Layout(pp=4, zero=zero, model=keys)
    for recipe, got in zip(recipes, train_layout(layout, [Job(str(folder), r, steps) for r in recipes])):
        compare(got, reference(hf_model(config), steps, recipe))


def _padding_rank(rank: int, layout: Layout, folder: str, rows: list[Document]) -> Any:
    """Poison the vocabulary's padding rows before DeepSpeed takes its fp32 copies."""
    from hybrid5d.engine import build as module_under_test

    load, poisoned = module_under_test.load_hf_weights, []

    def load_and_poison(module: torch.nn.Module, *args: Any) -> None:
        load(module, *args)
        for param in module.parameters():
            piece = pieces_of(param)[0]
            if piece.name in ("lm_head.weight", "model.embed_tokens.weight") and param.shape[0] > piece.length:
                with torch.no_grad():
                    param[piece.length :] = 10.0
                poisoned.append((param, piece))

    module_under_test.load_hf_weights = load_and_poison
    engine = build_engine(layout, SGD, folder, len(rows))
    result = engine.train_batch(step_batch(rows, layout.dp, engine.ctx.dp.rank, 1))
    untouched = all(bool((p[piece.length :] == 10.0).all()) for p, piece in poisoned)
    return result.loss, result.grad_norm, len(poisoned), untouched


@pytest.mark.parametrize("tp", [2, 4])
def test_padding_rows_of_the_vocabulary_take_no_part(tp: int, folders: dict[str, Path]) -> None:
    """vocab 101 at tp 2 and 4; padding rows at +10 take no probability and get no gradient."""
    rows = make_rows(4, 16, 101)
    want = reference(hf_model(MODELS["llama"]), [rows], SGD)
    ranks = run_ranks(tp, _padding_rank, Layout(tp=tp), str(folders["llama"]), rows)
    assert sum(r[2] for r in ranks) == 2  # embedding and head of the last rank
    for loss, norm, _, untouched in ranks:
        assert abs(loss - want.losses[0]) < 1e-5 and abs(norm / want.norms[0] - 1) < 1e-5
        assert untouched
