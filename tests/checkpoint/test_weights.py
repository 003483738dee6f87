"""Start weights on several ranks: a fault that one rank alone can see stops all of them with its message."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from hybrid5d.errors import HybridError
from tests.engine_kit import Layout, build_engine
from tests.harness import run_ranks
from tests.kit import MODELS, Recipe, save_model

LAYOUT = Layout(tp=2, pp=2)


def _error(rank: int, layout: Layout, folder: str) -> tuple[str, str]:
    with pytest.raises(HybridError) as caught:
        build_engine(layout, Recipe(), folder, 4)
    return type(caught.value).__name__, str(caught.value)


def errors(folder: Path) -> tuple[str, str]:
    """Type and text of the error, which all ranks raise."""
    ranks = run_ranks(LAYOUT.world, _error, LAYOUT, str(folder), timeout=60)
    assert len(set(ranks)) == 1
    return ranks[0]


def test_nan_in_one_ranks_slice(tmp_path: Path) -> None:
    path = save_model(MODELS["llama"], tmp_path) / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.3.mlp.gate_proj.weight"][63, 0] = float("nan")  # tp rank 1 of the last stage
    save_file(tensors, path, {"format": "pt"})
    kind, text = errors(tmp_path)
    assert kind == "CheckpointError"
    assert (
        text
        == f"rank 3: {path}: model.layers.3.mlp.gate_proj.weight holds NaN or infinite values; the weights are damaged"
    )


def test_truncated_file_is_one_line_for_all(tmp_path: Path) -> None:
    path = save_model(MODELS["llama"], tmp_path) / "model.safetensors"
    os.truncate(path, path.stat().st_size - 10)
    kind, text = errors(tmp_path)
    assert kind == "ConfigErrors" and "is truncated" in text and "rank" not in text and len(text.splitlines()) == 1
