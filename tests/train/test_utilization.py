"""What a run says of its arithmetic: parameters as transformers counts them, FLOPs and MFU in closed form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hybrid5d.plan.flops import flop, model_line
from hybrid5d.plan.hardware import load_hardware
from hybrid5d.plan.run import RunPlan, build_plan
from hybrid5d.train.utilization import Utilization, memory_line
from tests.config_kit import config_of, write_model
from tests.train.test_metrics import result


@pytest.fixture
def plan(tmp_path: Path) -> RunPlan:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"input_ids": [1, 2, 3]}))
    return build_plan(
        config_of(
            actor__model__model_path=str(write_model(tmp_path / "m")), actor__model__load_weights=False,
            actor__model__tensor_model_parallel_size=2, runner__seq_length=48, data__type="tokens",
            data__train_data_paths=[str(rows)],
        ),
        2,
    )  # fmt: skip


def test_parameters_and_flops(plan: RunPlan) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(plan.config.actor.model.model_path)
    model = AutoModelForCausalLM.from_config(config)
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    if config.tie_word_embeddings:
        matrices.append(model.get_input_embeddings().weight)
    scores = 6 * config.num_hidden_layers * 48 * config.num_attention_heads * config.head_dim
    each = 6 * sum(p.numel() for p in matrices) + scores
    count = sum(p.numel() for p in model.parameters())
    assert model_line(plan) == f"model: {count:,} parameters, {flop(each)} a token of rows of 48 (causal)"
    used = Utilization(plan, load_hardware("h100"))
    step = result(tokens=1000, step_time_s=0.25)
    assert used.mfu(step) == pytest.approx(each * 1000 / 0.25 / (2 * 494e12))


def test_no_peak_no_mfu(plan: RunPlan) -> None:
    assert Utilization(plan, None).mfu(result()) is None
    bf16_only = load_hardware("h100")
    bf16_only.peak_tflops.pop("fp32")
    assert Utilization(plan, bf16_only).mfu(result()) is None


def test_numbers_with_units() -> None:
    assert [flop(x) for x in (5, 1.14e5, 2.5e6, 9.876e9, 1.2e13, 3e18)] == [
        "5 FLOP", "114 kFLOP", "2.5 MFLOP", "9.88 GFLOP", "12 TFLOP", "3e+03 PFLOP",
    ]  # fmt: skip


def test_memory_beside_the_plan(plan: RunPlan) -> None:
    line = memory_line(plan, 3 * 2**29, torch.device("cpu"))
    assert line.startswith("memory: 1.50 GiB resident") and line.endswith("GiB of tensors")
