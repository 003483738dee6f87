"""What train and the workers refuse: one line per fault, all at once, exit 2, without torch, nothing started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.config_kit import REPO

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
    "intermediate_size": 96, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "max_position_embeddings": 64,
}  # fmt: skip
TP, PP = "actor.model.tensor_model_parallel_size", "actor.model.pipeline_model_parallel_size"
_PROGRAM = """
import atexit, os, sys
from {module} import main
os._exit = sys.exit  # the worker leaves by it, past what is registered here
atexit.register(lambda: "torch" in sys.modules and print("TORCH", file=sys.stderr))
main()
"""


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1, 2, 3]}\n' * 8)
    tree: dict[str, Any] = {
        "runner": {"max_steps": 1, "output_dir": str(tmp_path / "out")},
        "data": {
            "type": "tokens", "train_data_paths": [str(tmp_path / "rows.jsonl")], "cache_dir": str(tmp_path / "cache"),
        },
        "actor": {"global_batch_size": 4, "model": {"model_path": str(folder), "load_weights": False}},
    }  # fmt: skip
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def started(words: list[str], environ: dict[str, str] | None = None) -> tuple[int, list[str]]:
    """Exit code, lines of standard error; one of them is TORCH where torch was imported."""
    worker = words[0] == "worker"
    program = _PROGRAM.format(module="hybrid5d.launch.worker" if worker else "hybrid5d.cli")
    done = subprocess.run(
        [sys.executable, "-c", program, *words[worker:]], capture_output=True, text=True, timeout=60, cwd=REPO,
        env={**os.environ, **(environ or {})},
    )  # fmt: skip
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize(
    "procs, words, told",
    [
        (4, [f"{TP}=2"], [f"{TP}=2: num_attention_heads=9 is not a multiple"]),
        (4, ["actor.model.sequence_parallel=true"], ["actor.model.sequence_parallel=True: sequence parallelism cuts"]),
        (3, [f"{PP}=2"], ["world_size=3: not a multiple of"]),
        (3, ["actor.global_batch_size=4"], ["actor.global_batch_size=4: "]),
        (
            4,
            [f"{PP}=2", "actor.deepspeed.zero_optimization.stage=3", "actor.optim.clip_grad=0"],
            ["actor.deepspeed.zero_optimization.stage=3: ZeRO 3 does not work with pipeline_model_parallel_size=2"],
        ),
        (
            8,
            [f"{TP}=2", "actor.lr_sched.lr_decay_iters=5", "actor.lr_sched.lr_warmup_iters=5", "data.type=vision"],
            [f"{TP}=2: ", "actor.lr_sched.lr_warmup_iters=5: ", "data.type='vision': "],
        ),
        (1, ["actor.optim.lr=fast"], ["actor.optim.lr='fast': "]),
        (1, ["actor.optim.learning_rate=1"], ["actor.optim.learning_rate=1: "]),
        (1, ["data.train_data_paths=[nowhere.jsonl]"], ["data.train_data_paths='nowhere.jsonl': no such file"]),
        (1, ["actor.model.precision=bf16", "actor.optim.fp16=true"], ["actor.optim.fp16=True: "]),
        (1, ["runner.logger.logger_backends=[paper]"], ["runner.logger.logger_backends='paper': unknown tracker"]),
        (1, ["runner.resume_dir=nowhere"], ["runner.resume_dir='nowhere': "]),
    ],
)
def test_faults_are_told_at_once(run_yaml: Path, procs: int, words: list[str], told: list[str]) -> None:
    """Key, value, rule, fix; nothing is started."""
    code, lines = started(["train", str(run_yaml), "--num-procs", str(procs), *words])
    assert code == 2, lines
    assert len(lines) == len(told)
    for line, start in zip(sorted(lines), sorted(told)):
        assert line.startswith(start) and "Fix: " in line
    assert not (run_yaml.parent / "out").exists()


def test_what_sounds_illegal_and_is_not(run_yaml: Path) -> None:
    """Uneven layers, fewer micro-batches than stages. Checked by planning only."""
    from hybrid5d.launch.preflight import Argv, plan_run

    plan, _ = plan_run(Argv(run_yaml, (f"{PP}=4", "actor.global_batch_size=1")), 4)
    assert sum(plan.stages) == 30 and plan.batch.gradient_accumulation_steps == 1


@pytest.mark.parametrize("words", [["--frobnicate"], ["--local_rank=x"], []])
def test_worker_refuses_unknown_words(run_yaml: Path, words: list[str]) -> None:
    code, lines = started(["worker", *(["--config", str(run_yaml)] if words else []), *words])
    assert code == 2 and len(lines) == 1 and "TORCH" not in lines


@pytest.mark.parametrize("spelling", ["--local_rank=0", "--local-rank=0"])
def test_either_spelling_of_local_rank_and_a_wrong_override(run_yaml: Path, spelling: str) -> None:
    """The launchers' word is accepted, the user's mistake is named."""
    code, lines = started(["worker", spelling, "--config", str(run_yaml), "actor.optim.lrr=1e-3"])
    assert code == 2 and len(lines) == 1
    assert "actor.optim.lrr" in lines[0] and "actor.optim.lr" in lines[0].split("Fix")[1]


@pytest.mark.parametrize("bad, told", [("{oops", ":9: "), ('{"input_ids": [99999999]}', ":9: ")])
def test_rows_that_cannot_be_used_are_named_before_torch(run_yaml: Path, bad: str, told: str) -> None:
    rows = run_yaml.parent / "rows.jsonl"
    rows.write_text(rows.read_text() + bad + "\n")
    code, lines = started(["worker", "--config", str(run_yaml)])
    assert code == 2 and len(lines) == 1 and f"rows.jsonl{told}" in lines[0]


def test_accelerates_precision_is_compared(run_yaml: Path) -> None:
    environ = {"ACCELERATE_MIXED_PRECISION": "fp16"}
    code, lines = started(["worker", "--config", str(run_yaml), "actor.model.precision=bf16"], environ)
    assert code == 2 and len(lines) == 1
    assert "actor.model.precision='bf16'" in lines[0] and "ACCELERATE_MIXED_PRECISION" in lines[0]


def test_a_folder_that_cannot_be_written(run_yaml: Path) -> None:
    blocked = run_yaml.parent / "file"
    blocked.write_text("")
    code, lines = started(["train", str(run_yaml), "--num-procs", "1", f"runner.output_dir={blocked}"])
    assert code == 2 and len(lines) == 1 and lines[0].startswith("runner.output_dir=")


def test_unknown_launcher_and_missing_evaluation_data(run_yaml: Path) -> None:
    code, lines = started(["train", str(run_yaml), "--num-procs", "1", "--launcher", "mpirun"])
    assert code == 2 and "--launcher='mpirun'" in lines[0]
    code, lines = started(["train", str(run_yaml), "--num-procs", "2", "--launcher", "python"])
    assert code == 2 and "starts one process" in lines[0]
    code, lines = started(["eval", str(run_yaml), "--num-procs", "1"])
    assert code == 2 and lines[0].startswith("data.val_data_paths=None")
