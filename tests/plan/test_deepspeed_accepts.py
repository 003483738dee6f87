"""Every emitted ds_config goes through DeepSpeed's own parser, and our key tables equal the installed DeepSpeed's."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid5d.config.tree import leaves
from hybrid5d.plan.convert import translate
from hybrid5d.plan.deepspeed_keys import FORBIDDEN, SECTIONS, TOP_LEVEL
from hybrid5d.plan.run import RunPlan
from tests.config_kit import EXAMPLES, OWN_RLINF, rlinf_files

SOURCES = [*sorted(EXAMPLES.glob("*.yaml")), *rlinf_files()]


@cache
def plan_of(path: Path) -> RunPlan | None:
    translation = translate(path)
    return None if translation.errors else translation.plan


def parse(plan: RunPlan, monkeypatch: pytest.MonkeyPatch) -> Any:
    import deepspeed.runtime.config as ds

    monkeypatch.setattr(ds.dist, "get_rank", lambda *_: 0)
    axis = plan.layout.dp * plan.layout.cp
    mpu = SimpleNamespace(get_data_parallel_world_size=lambda: axis, get_model_parallel_world_size=lambda: 1)
    return ds.DeepSpeedConfig(copy.deepcopy(plan.deepspeed), mpu=mpu)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_deepspeed_reads_the_same_numbers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(path)
    if plan is None:
        return  # refused: there is nothing to parse
    config = parse(plan, monkeypatch)
    assert "auto" not in [v for _, v in leaves(plan.deepspeed)]
    assert set(plan.deepspeed) <= TOP_LEVEL and "scheduler" not in plan.deepspeed
    batch = plan.batch
    assert config.train_batch_size == batch.global_batch_size * plan.layout.cp
    assert config.train_batch_size == (
        batch.micro_batch_size * batch.gradient_accumulation_steps * plan.layout.dp * plan.layout.cp
    )
    assert config.gradient_clipping == plan.clip_grad and config.zero_optimization_stage == plan.zero_stage
    assert config.bfloat16_config.enabled == (plan.precision.dtype == "bf16")
    assert config.float16_config.enabled == (plan.precision.dtype == "fp16")
    if plan.precision.dtype == "fp16":
        assert config.float16_config.loss_scale == (plan.precision.loss_scale or 0)
    assert not config.pipeline["pipe_partitioned"] and not config.pipeline["grad_partitioned"]
    assert config.grad_accum_dtype == "fp32" and str(config.communication_data_type) == "torch.float32"
    assert config.optimizer_name == "adamw" and config.optimizer_params["torch_adam"] is True


def test_a_wrong_batch_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = translate(OWN_RLINF / "grpo.yaml").plan
    assert plan is not None
    plan.deepspeed["train_batch_size"] += 1
    with pytest.raises(AssertionError):
        parse(plan, monkeypatch)


def test_key_tables_equal_the_installed_deepspeed() -> None:
    from deepspeed.monitor.config import CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "tensorboard": TensorBoardConfig,
        "wandb": WandbConfig,
        "csv_monitor": CSVConfig,
    }
    for section, model in models.items():
        names = {*model.model_fields, *(f.alias for f in model.model_fields.values() if f.alias)}
        assert SECTIONS[section] == names, section
    from deepspeed.runtime import constants

    for constant in (
        "TRAIN_BATCH_SIZE",
        "GRADIENT_CLIPPING",
        "COMMUNICATION_DATA_TYPE",
        "PRESCALE_GRADIENTS",
        "DUMP_STATE",
        "GRADIENT_ALLREDUCE_OP",
        "WALL_CLOCK_BREAKDOWN",
        "CHECKPOINT",
        "DATA_TYPES",
        "DATALOADER_DROP_LAST",
        "LOG_LEVEL",
    ):
        assert getattr(constants, constant) in TOP_LEVEL
    assert {path.split(".")[0] for path in FORBIDDEN} <= TOP_LEVEL


def test_most_files_were_parsed() -> None:
    assert sum(plan_of(path) is not None for path in SOURCES) >= len(SOURCES) // 2 >= 6
