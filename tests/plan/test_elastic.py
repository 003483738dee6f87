"""F11 of a list of failures seen elsewhere: fewer processes, the same global batch, the nearest legal layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid5d.config.schema import RunConfig
from hybrid5d.plan.elastic import Elastic, nearest
from hybrid5d.plan.hardware import load_hardware
from tests.config_kit import config_of, write_model


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return made(tmp_path)


def made(folder: Path, **changes: Any) -> RunConfig:
    """tp 2 + sp x pp 2, 8 rows a step in micro-batches of 2; a model of 4 layers, 4 heads, 2 kv heads."""
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"input_ids": [1, 2, 3]}))
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4, "intermediate_size": 96}
    return config_of(**{
        "actor__model__model_path": str(write_model(folder / "m", **sizes)), "actor__model__load_weights": False,
        "actor__model__tensor_model_parallel_size": 2, "actor__model__pipeline_model_parallel_size": 2,
        "actor__model__sequence_parallel": True, "actor__global_batch_size": 8, "actor__micro_batch_size": 2,
        "data__type": "tokens", "data__train_data_paths": [str(rows)], "runner__seq_length": 64, **changes,
    })  # fmt: skip


def layout(config: RunConfig, processes: int) -> tuple[tuple[int, int, int, int], int, int]:
    """(tp, pp, cp, dp), idle, micro-batch size; the global batch stays."""
    found = nearest(config, processes)
    assert isinstance(found, Elastic), found
    lay, batch = found.plan.layout, found.plan.batch
    assert batch.global_batch_size == 8 == batch.micro_batch_size * batch.gradient_accumulation_steps * lay.dp
    assert lay.world_size + found.idle == processes
    return (lay.tp, lay.pp, lay.cp, lay.dp), found.idle, batch.micro_batch_size


@pytest.mark.parametrize(
    "processes, degrees, idle, micro",
    [
        (8, (2, 2, 1, 2), 0, 2),
        (16, (2, 2, 1, 4), 0, 2),
        (32, (2, 2, 1, 8), 0, 1),  # one row a rank
        (7, (2, 2, 1, 1), 3, 2),
        (6, (2, 2, 1, 1), 2, 2),
        (13, (2, 2, 1, 2), 5, 2),  # dp 3 does not cut 8 rows
        (5, (2, 2, 1, 1), 1, 2),
        (3, (1, 3, 1, 1), 0, 2),  # dp 3 does not cut 8 rows, tp 3 not 4 heads; cp 3 would change all three degrees
        (2, (2, 1, 1, 1), 0, 2),
        (1, (1, 1, 1, 1), 0, 2),
    ],
)
def test_layouts(config: RunConfig, processes: int, degrees: tuple[int, ...], idle: int, micro: int) -> None:
    assert layout(config, processes) == (degrees, idle, micro)


def test_what_is_changed_is_said_and_can_be_typed(config: RunConfig) -> None:
    found = nearest(config, 3)
    assert isinstance(found, Elastic)
    assert found.overrides() == (
        "actor.model.tensor_model_parallel_size=1", "actor.model.pipeline_model_parallel_size=3",
        "actor.model.sequence_parallel=false",
    )  # fmt: skip
    assert "8 rows a step as before, 4 micro-batches of 2 per dp rank" in found.text()
    whole = nearest(config, 8)
    assert isinstance(whole, Elastic) and whole.overrides() == () and "the YAML's own degrees" in whole.text()


def test_wishes_that_fit_one_pp_only_are_let_go(tmp_path: Path) -> None:
    uneven = made(tmp_path, actor__model__decoder_first_pipeline_num_layers=1, actor__model__pipeline_schedule="1f1b")
    assert layout(uneven, 4)[0] == (2, 2, 1, 1)
    found = nearest(uneven, 1)
    assert isinstance(found, Elastic) and "actor.model.decoder_first_pipeline_num_layers=null" in found.overrides()


def test_a_layout_that_does_not_fit_the_memory_is_left_out(config: RunConfig) -> None:
    card = load_hardware("a100")
    assert isinstance(nearest(config, 4, card), Elastic)
    errors = nearest(config, 4, replace(card, memory_gib=0.0001))
    assert isinstance(errors, list) and "fits the memory" in str(errors[0])


def test_other_faults_of_the_yaml_are_what_is_said(tmp_path: Path) -> None:
    errors = nearest(made(tmp_path, actor__lr_sched__min_lr=9.0), 4)
    assert isinstance(errors, list) and "actor.lr_sched.min_lr" in [e.key for e in errors]
