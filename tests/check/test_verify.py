"""`hybrid5d check`: right layouts are equal, planted faults are named by axis and tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid5d.check.cuts import parts
from hybrid5d.check.shrink import cut_of, shrink
from hybrid5d.check.verify import Verdict, verify
from hybrid5d.plan.run import build_plan
from tests.check import faults
from tests.cli_kit import hybrid5d
from tests.config_kit import config_of, native, write_model, write_yaml

TP, PP, CP = (f"actor__model__{n}_parallel_size" for n in ("tensor_model", "pipeline_model", "context"))
SP = "actor__model__sequence_parallel"


def found(folder: Path, world: int, plant: Callable[[], None] | None, model: dict[str, Any], **keys: Any) -> Verdict:
    """What a check of that layout finds."""
    path = str(write_model(folder / "model", **model))
    config = config_of(actor__model__model_path=path, actor__global_batch_size=4, data__train_data_paths=[], **keys)
    plan = build_plan(config, world, "translate")
    small = shrink(plan, cut_of(plan))
    return verify(small, parts(small.cut, 16), plant)


@pytest.mark.parametrize(
    ("plant", "world", "keys", "model", "axes", "tensor"),
    [
        (faults.partial_sums_left_out, 2, {TP: 2, SP: True}, {"model_type": "llama"}, ("sp",), "norm.weight"),
        (faults.partial_sums_left_out, 2, {TP: 2}, {"model_type": "llama", "num_key_value_heads": 1}, ("tp",),
         "k_proj.weight|v_proj.weight"),
        (faults.positions_shifted, 2, {CP: 2}, {}, ("cp",), "self_attn"),
        (faults.loss_times_dp, 4, {TP: 2}, {}, ("dp",), ""),
        (faults.tied_gradient_not_summed, 4, {PP: 2}, {}, ("pp",), "model.embed_tokens.weight"),
        (faults.first_stage_a_step_late, 2, {PP: 2}, {"tie_word_embeddings": False}, ("pp",),
         r"model.embed_tokens|model.layers.[01]\."),
    ],
    ids=["sp-norms", "kv-copies", "cp-positions", "dp-loss", "pp-tied", "pp-late"],
)  # fmt: skip
def test_a_planted_fault_is_named(
    tmp_path: Path, plant: Any, world: int, keys: Any, model: Any, axes: Any, tensor: str
) -> None:
    verdict = found(tmp_path, world, plant, model, **keys)
    assert not verdict.equal
    assert verdict.axes == axes
    assert verdict.tensor is not None
    assert re.search(tensor, verdict.tensor), verdict.tensor
    guilty = verdict.guilty
    assert guilty is not None
    if plant is faults.loss_times_dp:
        assert any("every first gradient is 2 times" in line for line in guilty.faults), guilty.faults


def test_what_a_run_chooses_is_in_both(tmp_path: Path) -> None:
    keys = {
        CP: 2, "actor__optim__optimizer": "sgd", "actor__optim__weight_decay": 0.1, "actor__optim__clip_grad": 0.0,
        "actor__freeze_parameters": ["model.embed_tokens.*", "*.o_proj.weight", "nothing.*"],
        "runner__enable_dynamic_batch_size": True, "runner__max_tokens_per_mbs": 4096,
    }  # fmt: skip
    verdict = found(tmp_path, 2, None, {"tie_word_embeddings": False}, **keys)
    assert verdict.equal, verdict.trials[0].faults
    comparison = verdict.trials[0].comparison
    assert comparison is not None and "model.embed_tokens.weight" in comparison.weights
    moved = {n for n in comparison.weights if not n.startswith("model.embed_tokens") and "o_proj" not in n}
    assert set(comparison.gradients) == moved
    assert verdict.data == "rows from a seed: the run names no data"


def test_the_command_proves_a_run_with_its_own_data(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", use_sliding_window=True, sliding_window=64, max_window_layers=3)
    records = [{"input_ids": [(7 * i + j) % 259 for j in range(9 + i)]} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in records))
    run = write_yaml(tmp_path / "run.yaml", native(
        actor__model__model_path=str(model), data__train_data_paths=[str(tmp_path / "rows.jsonl")],
        cluster__component_placement={"actor": "0-31"}, cluster__num_nodes=4, data__packing="documents",
        actor__model__recompute_granularity="selective", actor__optim__optimizer="sgd",
        actor__global_batch_size=64, actor__loss_normalization="micro_batch", **{TP: 4, SP: True, PP: 2},
    ))  # fmt: skip
    done = hybrid5d("check", run, "--ranks", "4", "--format", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(done.stdout)
    assert facts["equal"] and facts["axes"] == [] and facts["tensor"] is None
    layouts = [t["layout"] for t in facts["trials"]]
    # 4 ranks hold two axes at a time; every pair of the run's three is trained
    assert sorted(layouts) == [
        "dp 2 x pp 2", "tp 2 + sp x dp 2", "tp 2 + sp x pp 2"
    ]  # fmt: skip
    assert facts["data"].startswith(f"rows of {tmp_path / 'rows.jsonl'}")
    for trial in facts["trials"]:
        assert len(trial["steps"]) == 3
        assert min(s["grad_norm_one_process"] for s in trial["steps"]) > 0.4, "clipping must act"


def test_a_difference_ends_with_1_and_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hybrid5d.check import verify as module

    right = module.verify
    monkeypatch.setattr(module, "verify", lambda *args, **kwargs: right(*args, faults.loss_times_dp, **kwargs))
    run = write_yaml(tmp_path / "run.yaml", native(
        actor__model__model_path=str(write_model(tmp_path / "model")), cluster__component_placement={"actor": "0-3"},
        **{TP: 2},
    ))  # fmt: skip
    done = hybrid5d("check", run, f"{TP.replace('__', '.')}=1", "--world-size", 2)
    assert "notice: " in done.stderr  # the words win over the file, and that is said
    assert done.returncode == 1, done.stderr
    assert "DIFFERENT: dp\nLook first at model." in done.stdout
    assert "every first gradient is 2 times what it should be" in done.stdout


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"actor__model__precision": "fp16"}, "fp16 does not train"),
        ({"runner__task_type": "reasoning"}, "no reference for an RL step"),
        ({"actor__model__model_path": "nowhere"}, "config.json"),
        ({"actor__model__context_parallel_size": 4, "actor__model__cp_comm_type": "a2a+p2p",
          "actor__model__hierarchical_context_parallel_sizes": [2, 2]}, "--ranks 2: cp needs 4 ranks"),
    ],
)  # fmt: skip
def test_what_cannot_be_checked_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    model = {"actor__model__model_path": str(write_model(tmp_path / "model"))}
    done = hybrid5d("check", write_yaml(tmp_path / "run.yaml", native(**(model | changes))), "--ranks", "2")
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stdout == "" and "Traceback" not in done.stderr


def test_without_transformers_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hybrid5d.cli import check as module

    monkeypatch.setattr(module, "find_spec", lambda name: None)
    keys = {"actor__model__model_path": str(write_model(tmp_path / "model"))}
    done = hybrid5d("check", write_yaml(tmp_path / "run.yaml", native(**keys)))
    assert done.returncode == 2 and "transformers, which is not installed" in done.stderr
