"""`hybrid5d plan` as a user runs it; expected values are closed forms or counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli_kit import hybrid5d
from tests.config_kit import native, write_model, write_yaml
from tests.work import counted


def run_yaml(folder: Path, model: dict[str, Any] | None = None, **keys: Any) -> Path:
    """A YAML; its model folder holds a config.json where `model` says what."""
    changes: dict[str, Any] = {"actor__micro_batch_size": 1, **keys}
    if model is not None:
        changes["actor__model__model_path"] = str(write_model(folder / "model", **model))
    return write_yaml(folder / "run.yaml", native(**changes))


def plan(*words: Any) -> dict[str, Any]:
    done = hybrid5d("plan", *words, "--format", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_stages_count_the_vocabulary_where_it_is(tmp_path: Path) -> None:
    """Case 13's model: tied, h 2048, ffn 4096, V 50257, pp 8, stage 0 with 4 layers of 41,947,136 and the matrix."""
    sizes = {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 4096, "vocab_size": 50257,
        "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128,
        "tie_word_embeddings": True,
    }  # fmt: skip
    run = run_yaml(
        tmp_path, sizes, actor__model__pipeline_model_parallel_size=8, actor__global_batch_size=8,
        actor__model__decoder_first_pipeline_num_layers=4, actor__model__decoder_last_pipeline_num_layers=2,
    )  # fmt: skip
    found = plan(run, "--world-size", 8)["stages"]
    layer, vocabulary, norm = 41_947_136, 102_926_336, 2048
    layers = [stage["decoder_layers"] for stage in found]
    assert layers[0] == 4 and layers[-1] == 2 and sum(layers) == 24
    assert [stage["parameters"] for stage in found] == [
        4 * layer + vocabulary,
        *(n * layer for n in layers[1:-1]),
        2 * layer + vocabulary + norm,
    ]


@pytest.mark.parametrize("steps", [1, 2, 8, 600_000])
def test_schedule_is_the_closed_form_of_1f1b(tmp_path: Path, steps: int) -> None:
    """pp 4: (p-1)/(m+p-1) of the time is bubble, stage i holds min(p-i, m) micro-batches (cases 2 and 11)."""
    run = run_yaml(
        tmp_path, {"num_hidden_layers": 8}, actor__model__pipeline_model_parallel_size=4,
        actor__global_batch_size=steps,
    )  # fmt: skip
    found = plan(run, "--world-size", 4)
    schedule = found["schedule"]
    assert (schedule["name"], schedule["chunks"], schedule["makespan_units"]) == ("1f1b", 1, 3 * (steps + 3))
    assert schedule["bubble"] == found["bubble"] == pytest.approx(3 / (steps + 3))
    assert schedule["live_chunks"] == [min(4 - i, steps) for i in range(4)]
    assert any(w.startswith("bubble") for w in found["warnings"]) == (3 / (steps + 3) > 0.2)


def test_groups_across_nodes(tmp_path: Path) -> None:
    """tp 2, cp 2, dp 2, pp 2 with 4 ranks a node: a node holds one tp x cp block, a pipeline stage two nodes."""
    run = run_yaml(
        tmp_path, {}, actor__model__tensor_model_parallel_size=2, actor__model__context_parallel_size=2,
        actor__model__pipeline_model_parallel_size=2, actor__model__cp_comm_type="a2a", actor__global_batch_size=8,
    )  # fmt: skip
    found = plan(run, "--world-size", 16, "--gpus-per-node", 4)
    assert found["layout"]["groups"] == {
        "tp": {"size": 2, "count": 8, "across_nodes": 0},
        "cp": {"size": 2, "count": 8, "across_nodes": 0},
        "dp": {"size": 2, "count": 8, "across_nodes": 8},
        "pp": {"size": 2, "count": 8, "across_nodes": 8},
    }
    assert not [w for w in found["warnings"] if "span nodes" in w]
    narrow = [w for w in plan(run, "--world-size", 16, "--gpus-per-node", 1)["warnings"] if "span nodes" in w]
    assert ["tensor-parallel" in narrow[0], "Ulysses" in narrow[1]] == [True, True] and len(narrow) == 2


def test_batch_in_both_terms(tmp_path: Path) -> None:
    """cp is folded into DeepSpeed's data axis: its batch is cp times the user's."""
    run = run_yaml(tmp_path, {}, actor__model__context_parallel_size=2, actor__global_batch_size=12)
    batch = plan(run, "--world-size", 8)["batch"]
    assert (batch["global_batch_size"], batch["gradient_accumulation_steps"]) == (12, 3)
    assert batch["deepspeed"] == {
        "train_batch_size": 24, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 3,
    }  # fmt: skip


def test_without_a_model_folder(tmp_path: Path) -> None:
    run = run_yaml(tmp_path, actor__model__model_path="/nowhere", actor__model__num_layers=4)
    found = plan(run, "--world-size", 1)
    assert found["stages"] == [{"stage": 0, "decoder_layers": 4, "runs": [4], "parameters": None}]
    assert any("sizes are not known" in w for w in found["warnings"])
    assert [found[key] for key in ("memory", "traffic", "flops", "time", "mfu")] == [None] * 5


def test_sizes_from_the_yaml(tmp_path: Path) -> None:
    """No model folder: 2 x (12 h^2 + 2 h) and two matrices of V x h and the last norm."""
    sizes = {
        "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 192, "num_attention_heads": 2, "num_query_groups": 1,
        "padded_vocab_size": 1000,
    }  # fmt: skip
    keys = {f"actor__model__{name}": value for name, value in sizes.items()}
    found = plan(run_yaml(tmp_path, actor__model__model_path="/nowhere", **keys), "--world-size", 1)
    assert found["stages"][0]["parameters"] == 2 * (12 * 64**2 + 2 * 64) + 2 * 1000 * 64 + 64
    assert found["memory"]["per_stage"][0]["weights"] == 4 * found["stages"][0]["parameters"]


def test_16384_ranks_are_within_a_second_of_work(tmp_path: Path) -> None:
    run = run_yaml(
        tmp_path, {"num_hidden_layers": 128, "num_attention_heads": 64, "num_key_value_heads": 8},
        actor__model__tensor_model_parallel_size=8, actor__model__pipeline_model_parallel_size=16,
        actor__global_batch_size=2048,
    )  # fmt: skip
    found, calls = counted(plan, run, "--world-size", 16384)
    assert found["layout"]["world_size"] == 16384 and calls.total() < 3_000_000


def test_measured_step_explain_and_diff(tmp_path: Path) -> None:
    """A step that needs more than the peak is a warning, no MFU; a plausible one is compared."""
    run = run_yaml(tmp_path, {}, actor__global_batch_size=8)
    good = plan(run, "--world-size", 1, "--measured", 1.0)
    short = good["measured"]["mfu"] / 3  # a step this long needs three times the peak
    bad = plan(run, "--world-size", 1, "--measured", short)
    assert 0 < good["measured"]["mfu"] < 1 and good["measured"]["over_planned"] == pytest.approx(
        1 / good["time"]["total"]
    )
    assert bad["measured"] == {"seconds": short} and any("3.00 times the peak of h100" in w for w in bad["warnings"])
    told = hybrid5d("plan", run, "--world-size", 1, "--explain", "memory.per_stage.gradients").stdout
    assert "fp32" in told and str(good["memory"]["per_stage"][0]["gradients"]) in told
    other = write_yaml(
        tmp_path / "b.yaml", native(actor__model__model_path=str(tmp_path / "model"), actor__global_batch_size=16)
    )
    done = hybrid5d("plan", run, "--world-size", 1, "--diff", other, "--format", "json")
    changes = {c["key"]: c for c in json.loads(done.stdout)["changes"]}
    assert changes["batch.global_batch_size"] == {"key": "batch.global_batch_size", "a": 8, "b": 16, "ratio": 2.0}
    assert changes["flops.per_step.causal"]["ratio"] == pytest.approx(2) and "flops.per_token.causal" not in changes


def test_a_card_without_the_runs_precision_is_refused(tmp_path: Path) -> None:
    card = tmp_path / "card.yaml"
    card.write_text(
        "{peak_tflops: {bf16: 1}, best_matmul: 1, memory_gib: 1, memory_tbps: 1, link_gbps: 1, network_gbps: 1}"
    )
    done = hybrid5d("plan", run_yaml(tmp_path, {}, actor__global_batch_size=2), "--world-size", 1, "--gpu", card)
    assert done.returncode == 2 and "has no figure for fp32" in done.stderr


def test_frozen_weights_are_not_priced_in_silence(tmp_path: Path) -> None:
    run = run_yaml(tmp_path, {}, actor__global_batch_size=2, actor__freeze_parameters=["model.embed_tokens.weight"])
    assert any("freeze_parameters" in w and "as trained" in w for w in plan(run, "--world-size", 1)["warnings"])


def test_text_names_every_part(tmp_path: Path) -> None:
    run = run_yaml(tmp_path, {}, actor__model__pipeline_model_parallel_size=2, actor__global_batch_size=2)
    done = hybrid5d("plan", run, "--world-size", 2)
    assert done.returncode == 0
    for word in ("layout", "batch", "DeepSpeed", "stage 0", "stage 1", "schedule  1f1b: 9 units", "warning   bubble"):
        assert word in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--format", "xml"), "known formats are text and json and html"),
        (("--format", "html", "--diff", "b.yaml"), "a page shows one forecast"),
        (("--gpu", "h800"), "neither a machine of hardware.yaml (a100, h100, h200, cpu) nor a YAML file"),
        (("--explain", "memry"), "did you mean memory?"),
        (("--diff", "/nowhere.yaml"), "/nowhere.yaml"),
        (("--search", "--diff", "b.yaml"), "--search and --diff"),
        (("--diff", "b.yaml", "--explain", "memory"), "--diff and --explain"),
        (("--search", "--measured", "1"), "a search has no one step"),
        (("--measured", "1", "--diff", "b.yaml"), "--measured: one step's time says nothing of the other run"),
        (("--search", "--world-size", "2", "--write", "/no/such/best.yaml"), "'/no/such' is no folder"),
        (("--explain", "memory", "--format", "json"), "--explain writes text"),
        (("actor.micro_batch_size=0",), "actor.micro_batch_size"),
    ],
)
def test_what_it_cannot_do_is_refused(tmp_path: Path, words: tuple[str, ...], named: str) -> None:
    done = hybrid5d("plan", run_yaml(tmp_path, {}), *words)
    assert done.returncode == 2 and named in done.stderr and not done.stdout
