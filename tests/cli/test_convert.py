"""`hybrid5d convert` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid5d.load import load_config
from hybrid5d.plan.convert import translate
from hybrid5d.plan.report import build_report
from hybrid5d.plan.run import build_plan
from tests.cli_kit import Done, hybrid5d
from tests.config_kit import EXAMPLES, REPO, native, write_model, write_yaml

RUN = EXAMPLES / "qwen2.5-7b-cp2.yaml"


def convert(*words: str | Path, cwd: Path = REPO) -> Done:
    return hybrid5d("convert", *words, cwd=cwd)


def test_json_holds_every_part() -> None:
    done = convert(RUN, "--format", "json")
    assert done.returncode == 0 and done.stderr == ""
    data = json.loads(done.stdout)
    assert data["verdict"] == "translate" and data["errors"] == []
    assert data["layout"] == {
        "world_size": 8,
        "tp": 2,
        "pp": 1,
        "cp": 2,
        "dp": 2,
        "sequence_parallel": True,
        "rank_order": "tp-cp-dp-pp",
        "decoder_layers_per_stage": [28],
    }
    assert data["batch"] == {
        "global_batch_size": 512,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 256,
        "sequences_per_rl_step": 2048,
        "n_minibatches": 4,
        "dynamic": False,
        "max_tokens_per_micro_batch": None,
    }
    assert data["optimizer"]["type"] == "AdamW" and data["optimizer"]["betas"] == [0.9, 0.95]
    assert data["schedule"]["style"] == "constant" and data["schedule"]["warmup_steps"] == 10
    assert data["precision"] == {"dtype": "bf16", "loss_scale": None}
    assert data["deepspeed"]["train_batch_size"] == 1024
    assert set(data) >= {"engine", "report", "notices"}


def test_out_writes_five_files_that_agree(tmp_path: Path) -> None:
    done = convert(RUN, "--out", tmp_path / "o")
    assert done.returncode == 0, done.stderr
    names = {p.name for p in (tmp_path / "o").iterdir()}
    assert names == {"ds_config.json", "accelerate.yaml", "layout.json", "resolved.yaml", "report.json"}
    ds = json.loads((tmp_path / "o" / "ds_config.json").read_text())
    report = json.loads((tmp_path / "o" / "report.json").read_text())
    assert ds == report["deepspeed"] and '"auto"' not in json.dumps(ds)
    accelerate = yaml.safe_load((tmp_path / "o" / "accelerate.yaml").read_text())
    assert accelerate["num_processes"] == 8 and Path(accelerate["deepspeed_config"]["deepspeed_config_file"]).is_file()
    layout = json.loads((tmp_path / "o" / "layout.json").read_text())
    assert layout["groups"]["cp"] == [[0, 2], [1, 3], [4, 6], [5, 7]] and len(layout["ranks"]) == 8
    again = translate(tmp_path / "o" / "resolved.yaml")
    first = translate(RUN)
    assert again.plan is not None and first.plan is not None and again.plan.config == first.plan.config
    assert again.plan.deepspeed == ds


def test_text_tells_the_story_and_every_disposition() -> None:
    done = convert(RUN)
    assert done.returncode == 0 and done.stderr == ""
    for words in (
        "TRANSLATE",
        "What you should know",
        "Overridden",
        "Dropped",
        "Engine",
        "DeepSpeed",
        "Defaulted",
        "rollout.tensor_parallel_size",
    ):
        assert words in done.stdout
    assert done.stdout.index("What you should know") < done.stdout.index("Overridden") < done.stdout.index("Dropped")


def test_refused_once_on_stderr_with_exit_2(tmp_path: Path) -> None:
    done = convert(
        RUN, "+cluster.auto_scheduler=true", "+actor.model.expert_model_parallel_size=4", "--out", tmp_path / "o"
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 2 and all("Fix: " in line for line in lines)
    assert "REFUSE" in done.stdout and "cluster.auto_scheduler=True" in done.stderr
    assert {p.name for p in (tmp_path / "o").iterdir()} == {"report.json"}
    data = json.loads(convert(RUN, "+cluster.auto_scheduler=true", "--format", "json").stdout)
    assert data["verdict"] == "refuse" and data["errors"][0]["key"] == "cluster.auto_scheduler"
    assert data["layout"]["dp"] == 2 and data["report"]


def test_world_size_and_gpus_per_node() -> None:
    assert translate(RUN, gpus_per_node=4).to_dict()["layout"]["dp"] == 1
    result = translate(RUN, world_size=16)
    assert result.to_dict()["layout"]["dp"] == 4 and any("--world-size 16" in n for n in result.notices)
    refused = translate(RUN, gpus_per_node=3)
    assert refused.errors[0].key == "world_size" and "= 4" in refused.errors[0].rule


def test_unchecked_rules_say_what_would_be_legal(tmp_path: Path) -> None:
    tree = native(actor__model__tensor_model_parallel_size=4, actor__model__pipeline_model_parallel_size=2)
    path = write_yaml(tmp_path / "a.yaml", tree)
    result = translate(path)
    unchecked = result.to_dict()["unchecked"]
    assert not result.errors and len(unchecked) == 4
    assert "multiples of 4" in " ".join(unchecked) and "1, 2 (replicated)" in " ".join(unchecked)
    model = write_model(tmp_path / "m", num_attention_heads=6, num_key_value_heads=3)
    checked = translate(path, model=str(model))
    assert checked.plan is not None and not checked.plan.unchecked
    assert [e.key for e in checked.errors] == ["actor.model.tensor_model_parallel_size"]
    numbers = translate(path, ["actor.model.num_attention_heads=6", "actor.model.num_query_groups=3"])
    assert [e.key for e in numbers.errors] == ["actor.model.tensor_model_parallel_size"]
    assert translate(path, model=str(tmp_path / "none")).errors[0].key == "--model"


def test_mixture_of_experts_by_the_folder(tmp_path: Path) -> None:
    path = write_yaml(tmp_path / "a.yaml", native())
    model = write_model(tmp_path / "m", model_type="qwen3_moe", num_experts=8)
    assert "mixture" in translate(path, model=str(model)).errors[0].rule


def test_vision_language_model_translates_with_a_notice(tmp_path: Path) -> None:
    tree = native(
        data__type="vlm",
        actor__training_backend="megatron",
        actor__model__model_type="qwen2.5_vl",
        actor__model__tensor_model_parallel_size=2,
        actor__lr_sched={"lr_decay_style": "constant"},
    )
    path = write_yaml(tmp_path / "a.yaml", tree)
    result = translate(path)
    assert not result.errors and any("vision-language" in n for n in result.notices)
    inner = {"num_hidden_layers": 4, "num_attention_heads": 5, "num_key_value_heads": 5, "vocab_size": 10}
    model = write_model(tmp_path / "m", model_type="qwen2_5_vl", vision_config={}, text_config=inner)
    assert "num_attention_heads=5" in translate(path, model=str(model)).errors[0].rule


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("actor.optim.lr", ["1e-06", "optimizer.params.lr", "peak learning rate"]),
        ("actor.model.seq_length", ["${runner.seq_length}", "32768", "overridden"]),
        ("actor.optim.overlap_param_gather", ["dropped", "step()"]),
        ("actor.model.cp_comm_type", ["defaulted", "p2p"]),
        ("rollout.tensor_parallel_size", ["dropped", "the training engine generates, in the actor's layout"]),
    ],
)
def test_explain(key: str, words: list[str]) -> None:
    done = convert(RUN, "--explain", key)
    assert done.returncode == 0
    assert all(word in done.stdout for word in words), done.stdout


def test_explain_an_unknown_key() -> None:
    done = convert(RUN, "--explain", "actor.optim.lrr")
    assert done.returncode == 2 and "actor.optim.lr?" in done.stderr


@pytest.mark.parametrize("words", [("nowhere.yaml",), (".",), (RUN, "--format", "xml"), (RUN, "--out", "/dev/null/x")])
def test_bad_calls_end_in_one_line(words: tuple[Any, ...]) -> None:
    done = convert(*words)
    assert done.returncode == 2 and "Traceback" not in done.stderr and done.stderr.strip()


def test_command_line_values_are_marked() -> None:
    result = translate(RUN, ["actor.optim.lr=5e-6", "~runner.max_steps"])
    found = {e["key"]: e for e in result.report}
    assert "command line" in found["actor.optim.lr"]["why"] and found["actor.optim.lr"]["value"] == 5e-6
    assert "removed" in found["runner.max_steps"]["why"]


def test_the_report_of_a_native_run_is_in_the_plan(tmp_path: Path) -> None:
    write_model(tmp_path / "m")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    tree = native(actor__model__model_path=str(tmp_path / "m"), data__train_data_paths=str(tmp_path / "rows.jsonl"))
    plan = build_plan(load_config(write_yaml(tmp_path / "a.yaml", tree)), 8)
    keys = [e["key"] for e in build_report(plan)]
    assert len(keys) == len(set(keys)) and "actor.optim.lr" in keys


def test_json_form_needs_no_torch() -> None:
    code = (
        "import sys\nfrom hybrid5d.plan.convert import translate\n"
        f"translate({str(RUN)!r}).to_dict()\n"
        "print([m for m in ('torch', 'deepspeed', 'transformers', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
