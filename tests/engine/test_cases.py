"""Kinds of fault that users of neighbouring systems reported (shared/cases), each with its right value."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybrid5d.data.types import IGNORE_INDEX, Document, StepBatch
from tests.engine_kit import Job, Layout, build_engine, compare, shards, train_layout
from tests.harness import RankFailure, run_ranks
from tests.kit import MODELS, Recipe, document_loss_sum, hf_model, make_rows, reference, save_model, step_batch

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


def labelled(length: int, valid: int, row: int) -> Document:
    """A row of which the first `valid` predictions count."""
    rng = np.random.default_rng(row)
    ids = rng.integers(0, 101, length).astype(np.int64)
    labels = np.full(length, IGNORE_INDEX, dtype=np.int64)
    labels[:valid] = ids[1 : valid + 1]
    return Document(ids, labels, row)


@pytest.mark.parametrize(
    "layout",
    [Layout(micro=8), Layout(micro=1), Layout(dp=2, micro=2), Layout(pp=2, micro=1), Layout(cp=4, micro=2)],
    ids=str,
)
def test_n01_cut_of_the_batch(layout: Layout, folders: dict[str, Path]) -> None:
    """57 valid tokens, 1 to 15 a row: the mean is over all of them however the batch is cut."""
    rows = [labelled(16, n, i) for i, n in enumerate((1, 2, 3, 5, 8, 10, 13, 15))]
    assert sum(int((d.labels >= 0).sum()) for d in rows) == 57
    one(layout, folders["llama"], [rows], Recipe(lr=0.5, steps=1))


@pytest.mark.parametrize("layout", [Layout(pp=p, micro=m) for p in (1, 2, 4) for m in (2, 8)], ids=str)
def test_n02_updates_do_not_scale_with_stages_or_micro_batches(layout: Layout, folders: dict[str, Path]) -> None:
    one(layout, folders["llama"], [make_rows(8, 16, 101)], Recipe(lr=1.0, steps=1))


@pytest.mark.parametrize("edge", [3, 11])
@pytest.mark.parametrize("layout", [Layout(cp=2), Layout(cp=4), Layout(cp=2, tp=2, sp=True)], ids=str)
def test_n11_only_the_label_at_a_chunk_edge(layout: Layout, edge: int, folders: dict[str, Path]) -> None:
    ids = np.random.default_rng(1).integers(0, 101, 16).astype(np.int64)
    labels = np.full(16, IGNORE_INDEX, dtype=np.int64)
    labels[edge] = ids[edge + 1]
    one(layout, folders["llama"], [[Document(ids, labels, 0)]], Recipe(lr=0.5, steps=1))


@pytest.mark.parametrize("layout", [Layout(cp=2), Layout(pp=2), Layout(dp=2), Layout(tp=2, sp=True)], ids=str)
def test_n13_parts_without_labels(layout: Layout, folders: dict[str, Path]) -> None:
    """Three of four micro-batches, and the labels of all but one cp rank, are empty."""
    rows = [labelled(16, 3 if i == 0 else 0, i) for i in range(4)]
    one(layout, folders["llama"], [rows], Recipe(lr=0.5, steps=1))


def _no_label_rank(rank: int, layout: Layout, folder: str, recipe: Recipe) -> Any:
    engine = build_engine(layout, recipe, folder, 4)
    before = shards(engine.module, lambda p: p)
    rows = [labelled(16, 0, i) for i in range(4)]
    result = engine.train_batch(step_batch(rows, layout.dp, engine.ctx.dp.rank, 1))
    after = shards(engine.module, lambda p: p)
    return result.loss, result.grad_norm, all(np.array_equal(a, b) for (_, a), (_, b) in zip(before, after))


@pytest.mark.parametrize("layout", [Layout(cp=2), Layout(pp=2), Layout(dp=2), Layout(tp=2, sp=True, dp=2)], ids=str)
def test_n13_no_label_at_all(layout: Layout, folders: dict[str, Path]) -> None:
    recipes = (SGD, Recipe("adamw", lr=0.1, clip=1.0))
    for recipe in recipes:
        for loss, norm, unchanged in run_ranks(layout.world, _no_label_rank, layout, str(folders["llama"]), recipe):
            assert (loss, norm, unchanged) == (0.0, 0.0, True)


@pytest.mark.parametrize("layout", [Layout(cp=2), Layout(cp=4), Layout(cp=2, pp=2)], ids=str)
def test_n10_positions_given_by_the_caller(layout: Layout, folders: dict[str, Path]) -> None:
    rows = [replace(d, position_ids=np.arange(len(d)) * 2 + 7) for d in make_rows(4, 16, 101)]
    one(layout, folders["llama"], [rows], Recipe(lr=0.5, steps=1))


@pytest.mark.parametrize(
    "layout", [Layout(pp=2), Layout(pp=4), Layout(pp=2, dp=2, zero=0), Layout(pp=2, tp=2, sp=True)], ids=str
)
def test_n09_tied_matrix_counts_once_in_norm_and_clip(layout: Layout, tmp_path: Path) -> None:
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
def test_h06_frozen_parameters(layout: Layout, pattern: str, folders: dict[str, Path]) -> None:
    """Frozen weights stay bitwise; norm and the rest equal a reference with the same freeze."""
    patterns = ["model.embed_tokens.weight", pattern] if layout.pp > 1 else [pattern]
    model = hf_model(MODELS["llama"])
    from fnmatch import fnmatchcase

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


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(
    "layers,keys",
    [(3, {}), (2, {}), (3, {"decoder_first_pipeline_num_layers": 0}), (4, {"decoder_last_pipeline_num_layers": 0})],
)
def test_h06_stage_without_layers(zero: int, layers: int, keys: dict[str, int], tmp_path: Path) -> None:
    """pp 4 with 2 or 3 layers: a stage holds the embedding alone (no norm weight), or norm and head alone."""
    config = {**MODELS["llama"], "num_hidden_layers": layers}
    folder = save_model(config, tmp_path / "m")
    steps = [make_rows(4, 16, 101, seed=s) for s in range(3)]
    recipes = (Recipe(lr=0.5, clip=0.4), Recipe("adamw", lr=1e-2, eps=1e-3, clip=0.4, weight_decay=0.1))
    layout = Layout(pp=4, zero=zero, model=keys)
    for recipe, got in zip(recipes, train_layout(layout, [Job(str(folder), r, steps) for r in recipes])):
        compare(got, reference(hf_model(config), steps, recipe))


@pytest.mark.parametrize("precision,bound", [("bf16", 2e-2)])
@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("zero", [0, 1])
def test_n21_bf16_accumulation(zero: int, micro: int, precision: str, bound: float, folders: dict[str, Path]) -> None:
    """dp 2, bf16 with fp32 accumulation and masters: close to the fp32 reference for every number of micro-batches."""
    steps = [make_rows(8, 16, 101, seed=s, ragged=False) for s in range(3)]
    want = reference(hf_model(MODELS["llama"]), steps, SGD)
    (got,) = train_layout(
        Layout(dp=2, micro=micro, zero=zero, precision=precision), [Job(str(folders["llama"]), SGD, steps)]
    )
    np.testing.assert_allclose(got.losses, want.losses, atol=bound)
    np.testing.assert_allclose(got.norms, want.norms, rtol=bound)
    for name, w in want.weights.items():
        assert np.linalg.norm(got.weights[name] - w) <= bound * np.linalg.norm(w), name


BF16 = [
    Layout(tp=2, sp=True, precision="bf16"),
    Layout(pp=2, precision="bf16"),
    Layout(cp=2, precision="bf16"),
    Layout(2, 2, 2, 1, True, precision="bf16"),
    Layout(zero=2, dp=2, tp=2, sp=True, precision="bf16"),
    Layout(zero=3, dp=2, precision="bf16"),
]


@pytest.mark.parametrize("layout", BF16, ids=str)
def test_bf16_layouts(layout: Layout, folders: dict[str, Path]) -> None:
    """bf16 differs from fp32 by rounding only: loss within 0.02, norm within 2 %, masters within 2 %."""
    steps = [make_rows(8, 16, 101, seed=s) for s in range(3)]
    for model in ("qwen2", "qwen3"):
        want = reference(hf_model(MODELS[model]), steps, SGD)
        (got,) = train_layout(layout, [Job(str(folders[model]), SGD, steps)])
        np.testing.assert_allclose(got.losses, want.losses, atol=2e-2, err_msg=model)
        np.testing.assert_allclose(got.norms, want.norms, rtol=2e-2, err_msg=model)
        for name, w in want.weights.items():
            assert np.linalg.norm(got.weights[name] - w) <= 2e-2 * np.linalg.norm(w), (model, name)


def _padding_rank(rank: int, layout: Layout, folder: str, rows: list[Document]) -> Any:
    """Poison the vocabulary's padding rows before DeepSpeed takes its fp32 copies."""
    from hybrid5d.engine import build as module_under_test

    load, poisoned = module_under_test.load_start_weights, []

    def load_and_poison(module: torch.nn.Module, *args: Any) -> None:
        load(module, *args)
        for param in module.parameters():
            piece = param.pieces[0]
            if piece.name in ("lm_head.weight", "model.embed_tokens.weight") and param.shape[0] > piece.length:
                with torch.no_grad():
                    param[piece.length :] = 10.0
                poisoned.append((param, piece))

    module_under_test.load_start_weights = load_and_poison
    engine = build_engine(layout, SGD, folder, len(rows))
    result = engine.train_batch(step_batch(rows, layout.dp, engine.ctx.dp.rank, 1))
    untouched = all(bool((p[piece.length :] == 10.0).all()) for p, piece in poisoned)
    return result.loss, result.grad_norm, len(poisoned), untouched


@pytest.mark.parametrize("tp", [2, 4])
def test_n19_padding_rows_of_the_vocabulary(tp: int, folders: dict[str, Path]) -> None:
    """vocab 101 at tp 2 and 4; padding rows at +10 take no probability and get no gradient."""
    rows = make_rows(4, 16, 101)
    want = reference(hf_model(MODELS["llama"]), [rows], SGD)
    ranks = run_ranks(tp, _padding_rank, Layout(tp=tp), str(folders["llama"]), rows)
    assert sum(r[2] for r in ranks) == 2  # embedding and head of the last rank
    for loss, norm, _, untouched in ranks:
        assert abs(loss - want.losses[0]) < 1e-5 and abs(norm / want.norms[0] - 1) < 1e-5
        assert untouched


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
@pytest.mark.parametrize("count", [0, 3, 5])
def test_n22_h02_evaluation(layout: Layout, count: int, folders: dict[str, Path]) -> None:
    """0, 3 and 5 rows of other lengths than training's: exact sums; training goes on as if nothing had happened."""
    rows = make_rows(8, 16, 101)
    held_out = make_rows(count, 23, 101, seed=9)
    model = hf_model(MODELS["qwen3"])
    with torch.no_grad():
        total = float(sum(document_loss_sum(model, d) for d in held_out))
    valid = sum(int((d.labels >= 0).sum()) for d in held_out)
    want = reference(model, [rows, rows], SGD)
    for before, _, losses, counts in run_ranks(layout.world, _eval_rank, layout, str(folders["qwen3"]), rows, held_out):
        assert before[1] == valid
        assert abs(before[0] - total) <= 1e-5 * max(valid, 1)
        np.testing.assert_allclose(losses, want.losses, atol=1e-5)
        assert counts == [sum(map(len, rows)), sum(int((d.labels >= 0).sum()) for d in rows)]


def _same_rows_rank(rank: int, layout: Layout, folder: str, rows: list[Document]) -> Any:
    engine = build_engine(layout, Recipe(lr=0.0), folder, len(rows))
    batch = step_batch(rows, layout.dp, engine.ctx.dp.rank, layout.micro)
    trained = engine.train_batch(batch)
    total, valid = engine.eval_batch(batch)
    return trained.loss, total / valid


@pytest.mark.parametrize("layout", [Layout(micro=2), Layout(pp=2, micro=2), Layout(cp=2), Layout(dp=2)], ids=str)
def test_n22_evaluation_equals_training_loss(layout: Layout, folders: dict[str, Path]) -> None:
    for trained, evaluated in run_ranks(
        layout.world, _same_rows_rank, layout, str(folders["llama"]), make_rows(8, 16, 101)
    ):
        assert abs(trained - evaluated) < 1e-6


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


RECOMPUTE = [
    ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}, 1),
    ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, 2),
    ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 3}, 2),
    ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 9}, 2),
    ({"recompute_granularity": "selective"}, 0),
    ({}, 0),
]


def _recompute_rank(rank: int, layout: Layout, folder: str, rows: list[Document]) -> Any:
    from hybrid5d.models.decoder import DecoderLayer, SelfAttention

    calls = {"layer": 0, "core": 0}
    forward, core = DecoderLayer.forward, SelfAttention._core

    def count_layer(self: Any, *args: Any) -> Any:
        calls["layer"] += 1
        return forward(self, *args)

    def count_core(self: Any, *args: Any) -> Any:
        calls["core"] += 1
        return core(self, *args)

    DecoderLayer.forward, SelfAttention._core = count_layer, count_core  # type: ignore[method-assign]
    try:
        engine = build_engine(layout, SGD, folder, len(rows))
        result = engine.train_batch(step_batch(rows, 1, 0, 1))
    finally:
        DecoderLayer.forward, SelfAttention._core = forward, core  # type: ignore[method-assign]
    return calls, result.loss, result.grad_norm


@pytest.mark.parametrize(
    "keys,layers", RECOMPUTE, ids=lambda v: str(v) if isinstance(v, int) else "-".join(map(str, v.values())) or "none"
)
@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(2, 2, 2, 1, True)], ids=str)
def test_p03_recompute_is_really_done(
    layout: Layout, keys: dict[str, Any], layers: int, folders: dict[str, Path]
) -> None:
    """Two decoder layers a stage: `layers` of them run forward twice; numbers are those of the reference."""
    rows = make_rows(4, 16, 101)
    want = reference(hf_model(MODELS["qwen3"]), [rows], SGD)
    layout = replace(layout, model=keys)
    for calls, loss, norm in run_ranks(layout.world, _recompute_rank, layout, str(folders["qwen3"]), rows):
        assert calls["layer"] == 4 * (2 + layers)
        assert calls["core"] == (4 * 2 * 2 if keys.get("recompute_granularity") == "selective" else calls["layer"])
        assert abs(loss - want.losses[0]) < 1e-5 and abs(norm / want.norms[0] - 1) < 1e-5


def _in_flight_rank(rank: int, layout: Layout, folder: str, count: int) -> Any:
    engine = build_engine(layout, SGD, folder, count)
    engine.train_batch(step_batch(make_rows(count, 16, 101), 1, 0, 1))
    return engine.ctx.pp.rank, engine.ds.max_in_flight


@pytest.mark.parametrize("count", [4, 16])
def test_p04_live_activations_do_not_grow_with_micro_batches(count: int, folders: dict[str, Path]) -> None:
    for stage, live in run_ranks(4, _in_flight_rank, Layout(pp=4), str(folders["llama"]), count):
        assert live == (4 - stage if stage < 3 else 0)  # the last stage keeps only its loss


def _mismatch_rank(rank: int, layout: Layout, folder: str) -> None:
    engine = build_engine(layout, SGD, folder, 4)
    rows = make_rows(4, 16, 101, seed=1 if rank == 1 else 0)
    engine.train_batch(step_batch(rows, layout.dp, engine.ctx.dp.rank, 1))


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(cp=2), Layout(pp=2)], ids=str)
def test_u05_peers_fed_different_rows(layout: Layout, folders: dict[str, Path]) -> None:
    with pytest.raises(RankFailure, match="belong to dp rank 0 but were given different rows"):
        run_ranks(layout.world, _mismatch_rank, layout, str(folders["llama"]))


@pytest.mark.parametrize("layout", [Layout(pp=2, micro=2), Layout(pp=4), Layout(cp=2, pp=2, micro=2)], ids=str)
def test_h07_lengths_change_in_every_micro_batch(layout: Layout, folders: dict[str, Path]) -> None:
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
def test_loss_normalization_micro_batch(layout: Layout, folders: dict[str, Path]) -> None:
    """RLinf's averaging: the mean over micro-batches of each one's token mean."""
    rows = [labelled(16, n, i) for i, n in enumerate((1, 2, 3, 5, 8, 10, 13, 15))]
    model = hf_model(MODELS["llama"])
    with torch.no_grad():
        sums = [float(document_loss_sum(model, d)) for d in rows]
    valid = [int((d.labels >= 0).sum()) for d in rows]
    want = np.mean([(sums[i] + sums[i + 1]) / (valid[i] + valid[i + 1]) for i in range(0, 8, 2)])
    layout = replace(layout, extra={"loss_normalization": "micro_batch"})
    for loss in run_ranks(layout.world, _micro_mean_rank, layout, str(folders["llama"]), rows):
        assert abs(loss - want) < 1e-5
