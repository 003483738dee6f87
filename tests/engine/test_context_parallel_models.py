"""Whole models under every context-parallel method, with packed documents, windows and scaled positions.

Pairs and triples of these choices are trained in test_equivalence.py; here stand longer rows, other sizes, and what
only context parallelism has.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybrid5d.data.types import IGNORE_INDEX, Document
from tests.engine_kit import Job, Layout, build_engine, compare, train_layout
from tests.harness import RankFailure, run_ranks
from tests.kit import MODELS, Recipe, hf_model, make_packed_rows, make_rows, reference, step_batch

SGD = Recipe(lr=0.5, steps=2)
ADAM = Recipe("adamw", lr=1e-2, eps=1e-3, weight_decay=0.1, clip=1.0, steps=2)
METHODS = ("p2p", "a2a", "a2a+p2p", "all_gather")


def cp(method: str, **layout: Any) -> Layout:
    return Layout(model={"cp_comm_type": method}, **layout)


def check(
    layout: Layout, folders: dict[str, Path], models: list[str], steps: list[list[Any]], recipe: Recipe = SGD
) -> None:
    jobs = [Job(str(folders[m]), recipe, steps) for m in models]
    for model, got in zip(models, train_layout(layout, jobs)):
        try:
            compare(got, reference(hf_model(MODELS[model]), steps, recipe))
        except AssertionError as exc:
            raise AssertionError(f"{layout}, {model}: {exc}") from None


def rows(count: int = 4, length: int = 21) -> list[list[Document]]:
    return [make_rows(count, length, 101, seed=s) for s in range(2)]


def packed(count: int = 4, length: int = 29) -> list[list[tuple[Document, ...]]]:
    return [make_packed_rows(count, length, 101, seed=s + 1) for s in range(2)]


NEIGHBOURS = [
    {"cp": 2},
    {"cp": 4},
    {"cp": 2, "tp": 2, "sp": True, "pp": 2},
    {"cp": 2, "dp": 2, "micro": 2},
    {"cp": 2, "tp": 2},
]


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("axes", NEIGHBOURS, ids=lambda a: str(Layout(**a)))
def test_methods_equal_one_process(method: str, axes: dict[str, Any], folders: dict[str, Path]) -> None:
    """GQA 4/2: at cp 4 and at tp 2 x cp 2 Ulysses repeats kv heads; odd lengths; several micro-batches."""
    check(cp(method, **axes), folders, ["llama", "qwen3"], rows())
    check(cp(method, **axes), folders, ["qwen2"], rows(), ADAM)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [Layout(tp=2, sp=True), Layout(pp=2), Layout(micro=4), Layout(dp=2, micro=2)], ids=str
)
def test_packed_documents_without_cp(layout: Layout, folders: dict[str, Path]) -> None:
    check(replace(layout, packing="documents"), folders, ["llama", "qwen3"], packed())


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "axes", [{"cp": 2}, {"cp": 4}, {"cp": 2, "tp": 2, "sp": True, "pp": 2, "micro": 2}], ids=lambda a: str(Layout(**a))
)
def test_packed_documents_with_cp(method: str, axes: dict[str, Any], folders: dict[str, Path]) -> None:
    """Documents of one token, shorter than 2*cp, and unlabelled ones; each equals its own forward pass."""
    check(cp(method, packing="documents", **axes), folders, ["qwen3", "qwen2"], packed())


@pytest.mark.parametrize("method", METHODS)
def test_sliding_windows(method: str, folders: dict[str, Path]) -> None:
    models = ["mistral_window", "qwen2_window"]
    check(cp(method, cp=2, tp=2, sp=True), folders, models, rows())
    check(cp(method, cp=2, packing="documents"), folders, models, packed())


def test_forced_kernel_and_methods_without_cp(folders: dict[str, Path]) -> None:
    """attention_kernel: the slow reference kernel trains to the same numbers; a method is harmless at cp 1."""
    for method in METHODS:
        check(Layout(model={"attention_kernel": "chunked", "cp_comm_type": method}), folders, ["qwen3"], rows())


def test_kernel_that_is_not_here_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(RankFailure, match="attention_kernel='flash_attn': cannot run fp32 on cpu with head size 8"):
        check(Layout(model={"attention_kernel": "flash_attn"}), folders, ["llama"], rows())


def test_sliding_windows_without_cp(folders: dict[str, Path]) -> None:
    check(Layout(pp=2, micro=2), folders, ["mistral_window", "qwen2_window"], rows())


@pytest.mark.parametrize("layout", [Layout(), Layout(cp=2, tp=2, sp=True), cp("a2a", cp=2), Layout(cp=4)], ids=str)
def test_scaled_positions(layout: Layout, folders: dict[str, Path]) -> None:
    """linear, llama3 and yarn beyond the original length, at positions that do not start at 0."""
    shifted = [[replace(d, position_ids=np.arange(len(d)) + 50) for d in batch] for batch in rows(length=40)]
    check(layout, folders, ["linear", "llama3", "yarn"], shifted)


@pytest.mark.parametrize(
    "keys", [{"cp_load_balance": "contiguous"}, {"cp_load_balance": "contiguous", "cp_comm_type": "all_gather"}]
)
def test_contiguous_cut(keys: dict[str, Any], folders: dict[str, Path]) -> None:
    check(Layout(cp=4, model=keys), folders, ["llama"], rows())


@pytest.mark.full
@pytest.mark.parametrize("sizes", [[2, 4], [4, 2], [1, 8], [8, 1]])
def test_hierarchical_sizes(sizes: list[int], folders: dict[str, Path]) -> None:
    layout = Layout(cp=8, model={"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": sizes})
    if sizes[0] == 8:  # 4 query heads cannot be dealt to 8 ranks
        with pytest.raises(Exception, match="num_attention_heads 4"):
            check(layout, folders, ["llama"], rows())
    else:
        check(layout, folders, ["llama", "qwen3"], rows(length=37))


@pytest.mark.full
@pytest.mark.parametrize("method", ["p2p", "a2a"])
@pytest.mark.parametrize(
    "keys",
    [
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ],
    ids=["selective", "full"],
)
def test_recompute(method: str, keys: dict[str, Any], folders: dict[str, Path]) -> None:
    layout = Layout(2, 2, 2, 1, True, packing="documents", model={"cp_comm_type": method, **keys})
    check(layout, folders, ["qwen3"], packed())


def _second_document_rank(rank: int, layout: Layout, folder: str, rows_: list[tuple[Document, ...]]) -> float:
    engine = build_engine(layout, SGD, folder, 1)
    return engine.train_batch(step_batch(rows_, 1, 0, 1)).loss


@pytest.mark.parametrize("layout", [Layout(), *(cp(m, cp=2) for m in METHODS), cp("p2p", cp=2, pp=2)], ids=str)
def test_documents_do_not_see_each_other(layout: Layout, folders: dict[str, Path]) -> None:
    """Only document 2 has labels: other tokens in document 1 change the loss by exactly 0."""
    layout = replace(layout, packing="documents")
    one, two = make_rows(2, 13, 101, seed=4, ragged=False)
    hidden = np.full(13, IGNORE_INDEX, dtype=np.int64)
    losses = set()
    for ids in (one.input_ids, (one.input_ids + 50) % 101):
        row = (Document(ids, hidden, 0), two)
        losses |= set(run_ranks(layout.world, _second_document_rank, layout, str(folders["qwen3"]), [row]))
    assert len(losses) == 1


def _two_models_rank(rank: int, small: str, large: str, rows_: list[Document]) -> list[float]:
    layout, losses = cp("a2a", cp=2), []
    first = build_engine(layout, SGD, small, len(rows_))
    second = build_engine(layout, SGD, large, len(rows_))
    for engine in (first, second, first):
        losses.append(engine.train_batch(step_batch(rows_, 1, 0, 1)).loss)
    return losses


def test_two_models_in_one_process(folders: dict[str, Path], tmp_path: Path) -> None:
    config = {**MODELS["llama"], "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64}
    torch.manual_seed(0)
    hf_model(config).save_pretrained(tmp_path / "large")
    steps = make_rows(4, 16, 101)
    a, b, c = run_ranks(2, _two_models_rank, str(folders["llama"]), str(tmp_path / "large"), steps)[0]
    want_small = reference(hf_model(MODELS["llama"]), [steps, steps], SGD).losses
    want_large = reference(hf_model(config), [steps], SGD).losses
    np.testing.assert_allclose([a, c, b], [*want_small, *want_large], atol=1e-5)
