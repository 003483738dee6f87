"""Raw DeepSpeed keys: each acts in training, is refused or noticed there; a translation passes them on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid5d.config.tree import get, leaves, put
from hybrid5d.plan.deepspeed_keys import FORBIDDEN, GATHER_ON_SAVE, SECTIONS, TOP_LEVEL, TRACKERS, UNUSED
from hybrid5d.plan.run import build_plan, examine
from tests.config_kit import config_of, error_lines, write_model

# Read by DeepSpeed in the calls that hybrid5d's engine makes: its constructor, ZeRO's optimizers, its log. They change
# speed, memory or what is printed.
ACT = {
    "dump_state", "disable_python_gc", "log_level", "memory_breakdown", "steps_per_print", "timers",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "data_types.buffer_dtype",
    "data_types.keep_in_fp32_modules", "bf16.check_grad_overflow",
}  # fmt: skip


def on(path: str) -> Any:
    """A value that asks for something."""
    return {"device": "cpu"} if path.split(".")[-1].startswith("offload_") else {"enabled": True, "any": 1}


@pytest.fixture
def ready(tmp_path: Path) -> dict[str, Any]:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input_ids": [1, 2, 3]}\n')
    return {
        "actor__model__model_path": str(write_model(tmp_path / "m")), "actor__model__load_weights": False,
        "data__type": "tokens", "data__train_data_paths": [str(rows)],
    }  # fmt: skip


@pytest.mark.parametrize("path", UNUSED)
def test_a_key_without_effect_is_refused_in_training_only(ready: dict[str, Any], path: str) -> None:
    block: dict[str, Any] = {}
    put(block, path, on(path))
    config = config_of(**ready, actor__deepspeed=block)
    lines = error_lines(build_plan, config, 1)
    assert (
        list(lines) == [f"actor.deepspeed.{path}"] and "has no effect in training" in lines[f"actor.deepspeed.{path}"]
    )
    plan, errors = examine(config, 1)
    assert plan is not None and not errors and get(plan.deepspeed, path) == on(path)


@pytest.mark.parametrize("value", [False, None, 0, "none", {"device": "none"}, {"enabled": False, "profile_step": 1}])
def test_a_key_that_asks_for_nothing_passes(ready: dict[str, Any], value: Any) -> None:
    block: dict[str, Any] = {}
    for path in ("zero_optimization.offload_optimizer", "zero_optimization.offload_param", "flops_profiler", "aio"):
        put(block, path, value)
    build_plan(config_of(**ready, actor__deepspeed=block), 1)


def test_cpu_checkpointing_is_refused_and_its_absence_is_not(ready: dict[str, Any]) -> None:
    block = {"activation_checkpointing": {"cpu_checkpointing": True, "profile": False}}
    lines = error_lines(build_plan, config_of(**ready, actor__deepspeed=block), 1)
    assert "recompute_granularity" in lines["actor.deepspeed.activation_checkpointing"]
    block["activation_checkpointing"]["cpu_checkpointing"] = False
    build_plan(config_of(**ready, actor__deepspeed=block), 1)


@pytest.mark.parametrize("name", [k for k in FORBIDDEN if "quantized" in k])
def test_quantised_communication_changes_the_numbers(ready: dict[str, Any], name: str) -> None:
    block: dict[str, Any] = {}
    put(block, name, True)
    assert f"actor.deepspeed.{name}" in error_lines(build_plan, config_of(**ready, actor__deepspeed=block), 1)


def test_whole_weights_are_exported_anyway(ready: dict[str, Any]) -> None:
    block = {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}}
    notices = build_plan(config_of(**ready, actor__deepspeed=block), 1).notices
    assert [n for n in notices if "stage3_gather_16bit_weights_on_model_save is not read" in n]


def test_every_key_has_a_place(ready: dict[str, Any]) -> None:
    """Of all names that DeepSpeed reads, each is ours, refused, noticed, or listed as acting."""
    ours = {p for path, _ in leaves(build_plan(config_of(**ready), 1).deepspeed) for p in (path, path.split(".")[0])}
    placed = ours | set(FORBIDDEN) | set(UNUSED) | GATHER_ON_SAVE | TRACKERS | ACT
    whole = TOP_LEVEL - {s for s in SECTIONS if s not in placed}
    assert whole <= placed, sorted(whole - placed)
