"""From a YAML to the loaders of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid5d.data.build import eval_loader_from_plan, loader_from_plan, tokenizer_name
from hybrid5d.load import load_config
from hybrid5d.plan.run import RunPlan, build_plan

MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 259, "hidden_size": 16,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip


def plan_of(tmp_path: Path, *overrides: str, world: int = 4) -> RunPlan:
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODEL))
    text = f"""
runner: {{task_type: sft, seq_length: 16, max_steps: 5, output_dir: {tmp_path}}}
data: {{type: text, train_data_paths: [stdlib/json], val_data_paths: [{tmp_path}/val.txt], cache_dir: {tmp_path}/cache}}
actor:
  training_backend: deepspeed
  micro_batch_size: 1
  global_batch_size: 8
  model: {{model_path: {model}, load_weights: false, precision: fp32, context_parallel_size: 2}}
  optim: {{lr: 1.0e-3}}
"""
    (tmp_path / "val.txt").write_text("some text to evaluate on, a bit longer than a row")
    (tmp_path / "run.yaml").write_text(text)
    return build_plan(load_config(str(tmp_path / "run.yaml"), overrides), world)


def test_loaders_of_a_plan(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    assert plan.layout.dp == 2 and tokenizer_name(plan) == "byte"
    ranks = [list(loader_from_plan(plan, r)) for r in range(2)]
    assert [len(r) for r in ranks] == [5, 5] and all(len(b.micro_batches) == 4 for r in ranks for b in r)
    assert [b.row_ids for b in ranks[0]] == [b.row_ids for b in ranks[1]]
    (last,) = loader_from_plan(plan, 1, start_step=4)
    assert last.row_ids == ranks[1][4].row_ids
    evaluation = [list(eval_loader_from_plan(plan, r)) for r in range(2)]
    assert [i for b in evaluation[0] for i in b.row_ids] == [0, 1, 2, 3]


def test_budget_of_a_plan_counts_the_cp_group(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "runner.enable_dynamic_batch_size=true", "runner.max_tokens_per_mbs=24")
    loader = loader_from_plan(plan, 0)
    assert loader.options.token_budget == 48
    plan = plan_of(tmp_path, "data.packing=documents", "actor.enable_dp_load_balance=true", "data.last_batch=drop_last")
    options = loader_from_plan(plan, 0).options
    assert options.token_budget is None and options.config.packing == "documents" and options.balance_dp
    assert options.config.last_batch == "drop_last" and options.config.seed == 42 and options.max_steps == 5


@pytest.mark.parametrize("overrides", [("data.val_data_paths=null",), ("data.val_data_paths=[]",)])
def test_no_evaluation_data(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    assert list(eval_loader_from_plan(plan_of(tmp_path, *overrides), 0)) == []
