"""Activation memory: recomputation is done where it is asked for, and 1F1B keeps few micro-batches alive."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid5d.data.types import Document
from tests.engine_kit import Layout, build_engine
from tests.harness import run_ranks
from tests.kit import (
    MODELS,
    Recipe,
    hf_model,
    make_rows,
    reference,
    step_batch,
)

SGD = Recipe(lr=0.5)


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
@pytest.mark.parametrize(
    "layout", [Layout(pp=2), pytest.param(Layout(2, 2, 2, 1, True), marks=pytest.mark.full)], ids=str
)
def test_recompute_is_really_done(layout: Layout, keys: dict[str, Any], layers: int, folders: dict[str, Path]) -> None:
    """Two decoder layers a stage: `layers` of them run forward twice; numbers are those of the reference."""
    rows = make_rows(4, 16, 101)
    want = reference(hf_model(MODELS["qwen3"]), [rows], SGD)
    layout = replace(layout, model=keys)
    for calls, loss, norm in run_ranks(layout.world, _recompute_rank, layout, str(folders["qwen3"]), rows):
        assert calls["layer"] == 4 * (2 + layers)
        assert calls["core"] == (4 * 2 * 2 if keys.get("recompute_granularity") == "selective" else calls["layer"])
        assert abs(loss - want.losses[0]) < 1e-5 and abs(norm / want.norms[0] - 1) < 1e-5


def _in_flight_rank(rank: int, layout: Layout, folder: str, count: int) -> Any:
    from deepspeed.runtime.pipe.schedule import ForwardPass

    from hybrid5d.engine.deepspeed.adapter import PipelineAdapter

    engine, forward, live = build_engine(layout, SGD, folder, count), PipelineAdapter._INSTRUCTION_MAP[ForwardPass], []

    def counted(self: Any, buffer_id: Any) -> None:
        forward(self, buffer_id)
        live.append(len(self._outputs))

    PipelineAdapter._INSTRUCTION_MAP[ForwardPass] = counted
    engine.train_batch(step_batch(make_rows(count, 16, 101), 1, 0, 1))
    return engine.ctx.pp.rank, max(live)


@pytest.mark.parametrize("count", [4, 16])
def test_live_activations_do_not_grow_with_micro_batches(count: int, folders: dict[str, Path]) -> None:
    for stage, live in run_ranks(4, _in_flight_rank, Layout(pp=4), str(folders["llama"]), count):
        assert live == 4 - stage
