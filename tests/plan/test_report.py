"""The account of every key says what the plan did, not what a list says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hybrid5d.config.schema import schema_keys
from hybrid5d.config.tree import MISSING, get, leaves
from hybrid5d.plan.convert import Translation, translate
from hybrid5d.plan.report import emit_engine
from tests.config_kit import OWN_RLINF, REPO, native, rlinf_files, write_yaml

RL = {"runner__task_type": "reasoning", "actor__training_backend": "megatron", "data__type": "math",
      "actor__lr_sched": {"lr_decay_style": "constant"}}  # fmt: skip


def translated(tmp_path: Path, **changes: Any) -> Translation:
    return translate(write_yaml(tmp_path / "run.yaml", native(**changes)), world_size=8)


def fate(result: Translation, key: str) -> tuple[str, str | None]:
    line = next(line for line in result.report if line["key"] == key)
    return line["disposition"], line["target"]


BATCH = {"actor__global_batch_size": 32, "actor__micro_batch_size": 2}


def test_an_rl_task_without_rollout_batch_size_uses_the_actors_sizes_and_says_so(tmp_path: Path) -> None:
    result = translated(tmp_path, **RL, **BATCH)
    assert not result.errors and result.plan is not None
    assert result.plan.batch.global_batch_size == 32 and result.plan.batch.gradient_accumulation_steps == 2
    for key, target in (("global", "train_batch_size"), ("micro", "train_micro_batch_size_per_gpu")):
        disposition, where = fate(result, f"actor.{key}_batch_size")
        assert disposition == "deepspeed" and where is not None and where.split(", ")[0] == target
    assert not any("overwritten" in n for n in result.notices)
    assert "sequences_per_rl_step" not in str(result.plan.config) and result.plan.batch.sequences_per_rl_step is None


def test_with_rollout_batch_size_they_are_overridden(tmp_path: Path) -> None:
    result = translated(tmp_path, **RL, **BATCH, data__rollout_batch_size=64)
    assert result.plan is not None and result.plan.batch.global_batch_size == 64
    assert fate(result, "actor.global_batch_size") == fate(result, "actor.micro_batch_size") == ("overridden", None)
    assert fate(result, "data.rollout_batch_size")[0] == "deepspeed"
    assert sum("overwritten by RLinf's RL batch arithmetic" in n for n in result.notices) == 2


def test_rl_sizes_in_an_sft_run_are_dropped(tmp_path: Path) -> None:
    sizes = {"data__rollout_batch_size": 64, "algorithm__group_size": 2, "algorithm__n_minibatches": 2}
    result = translated(tmp_path, **BATCH, **sizes, algorithm__training_batch_size_per_gpu=4)
    assert result.plan is not None and result.plan.deepspeed["train_batch_size"] == 32
    for name in (*sizes, "algorithm__training_batch_size_per_gpu"):
        assert fate(result, name.replace("__", ".")) == ("dropped", None)
    named = [e["key"] for e in result.report if "train_batch_size" in (e["target"] or "").split(", ")]
    assert named == ["actor.global_batch_size"]


def moved(before: Any, after: Any) -> set[str]:
    """Paths whose value is new."""
    old = dict(leaves(before))
    return {path for path, value in leaves(after) if old.get(path, MISSING) != value}


PROBES: list[tuple[str, Any, dict[str, Any]]] = [
    ("actor.global_batch_size", 16, {}),
    ("actor.micro_batch_size", 2, {"actor__global_batch_size": None}),
    ("actor.optim.lr", 0.25, {}),
    ("actor.optim.adam_beta1", 0.5, {}),
    ("actor.optim.adam_eps", 0.5, {"actor__optim__optimizer": "sgd"}),
    ("actor.optim.sgd_momentum", 0.5, {"actor__optim__optimizer": "sgd"}),
    ("actor.optim.sgd_momentum", 0.5, {}),
    ("actor.optim.weight_decay", 0.25, {}),
    ("actor.optim.weight_decay", 0.25, {f"actor__lr_sched__{n}_weight_decay": 0.1 for n in ("start", "end")}),
    ("actor.optim.clip_grad", 0.25, {}),
    ("actor.optim.loss_scale", 64.0, {"actor__model__precision": "bf16"}),
    ("actor.optim.loss_scale", 64.0, {"actor__model__precision": "fp16"}),
    ("actor.optim.hysteresis", 5, {"actor__model__precision": "fp16", "actor__optim__loss_scale": 64}),
    ("actor.optim.hysteresis", 5, {"actor__model__precision": "fp16"}),
    ("actor.optim.overlap_grad_reduce", True, {}),
    ("actor.optim.overlap_grad_reduce", True, {"actor__deepspeed": {"zero_optimization": {"overlap_comm": False}}}),
    ("actor.megatron.ddp_bucket_size", 12345, {}),
    ("actor.lr_sched.lr_warmup_iters", 20, {}),
    ("actor.lr_sched.lr_warmup_iters", 20, {"actor__lr_sched__lr_warmup_fraction": 0.5}),
    ("actor.lr_sched.lr_decay_iters", 300, {}),
    ("actor.lr_sched.min_lr", 1e-5, {}),
    ("actor.lr_sched.lr_wsd_decay_style", "linear", {}),
    ("actor.model.recompute_num_layers", 3, {"actor__model__recompute_method": "block"}),
    ("actor.model.seq_length", 64, {}),
    ("actor.model.seq_length", 64, {"runner__seq_length": None}),
    ("runner.max_tokens_per_mbs", 4096, {}),
    ("data.packing", "documents", {}),
    ("data.overlong", "drop", {}),
    ("actor.model.attention_kernel", "chunked", {}),
    ("algorithm.group_size", 4, {**RL, "data__rollout_batch_size": 64}),
    ("algorithm.group_size", 4, {}),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "changes"), PROBES)
def test_the_target_is_where_the_value_shows(tmp_path: Path, key: str, value: Any, changes: dict[str, Any]) -> None:
    """Changing a key changes what the report names, and nothing where the report says that it is lost."""
    before = translated(tmp_path, **changes)
    after = translated(tmp_path, **changes, **{key.replace(".", "__"): value})
    assert before.plan is not None and after.plan is not None and not after.errors
    deepspeed = moved(before.plan.deepspeed, after.plan.deepspeed)
    engine = moved(emit_engine(before.plan).tree, emit_engine(after.plan).tree)
    disposition, target = fate(after, key)
    named = set((target or "").split(", ")) - {""}
    assert not any(line["why"] == "nothing reads it" for line in after.report)
    if disposition in ("dropped", "overridden"):
        assert not deepspeed and not engine
    elif disposition == "deepspeed":
        assert deepspeed and deepspeed <= named
    else:
        assert engine and engine <= named


@pytest.mark.parametrize("path", rlinf_files(), ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_target_exists(path: Path) -> None:
    result = translate(path)
    if result.plan is None:
        return
    trees = {"deepspeed": result.plan.deepspeed, "engine": emit_engine(result.plan).tree}
    for line in result.report:
        if line["disposition"] in trees and line["key"] not in result.keys.aliases:
            for where in (line["target"] or "").split(", "):
                assert get(trees[line["disposition"]], where, MISSING) is not MISSING, line


def test_what_a_field_says_goes_to_the_engine_is_read_there() -> None:
    """Each `to=` key's name occurs as an attribute outside config, rlinf and the report."""
    package = REPO / "hybrid5d"
    ours = [p for p in package.rglob("*.py") if p.parts[-2] not in ("config", "rlinf") and p.name != "report.py"]
    text = "\n".join(p.read_text() for p in ours)
    elsewhere = {"runner.task_type", "actor.training_backend", "algorithm.loss_type"}  # one value, or how it is read
    elsewhere |= {f"data.{n}_key" for n in ("messages", "prompt", "response", "instruction", "input", "output")}
    for key, field in schema_keys().items():
        name = key.rpartition(".")[2]
        extra = field.json_schema_extra or {}
        if extra.get("to") and key not in elsewhere and not key.startswith("critic."):
            assert re.search(rf"\.{name}\b|option\(\w+, \"{name}\"", text), key


def test_every_field_has_a_fate() -> None:
    """Without `to` and `unread` the plan must make something of a key, whatever the run."""
    always = translate(OWN_RLINF / "vision_sft.yaml")
    assert not any(line["why"] == "nothing reads it" for line in always.report)
