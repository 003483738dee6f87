"""Files of RLinf's shape: verdicts, numbers, and an account of every key.

`yamls/` holds files of our own; where a corpus of RLinf's own files lies beside the checkout, they are read too.
"""

from __future__ import annotations

import csv
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid5d.load import load_config
from hybrid5d.plan.convert import Translation, translate
from hybrid5d.plan.outputs import plan_files
from hybrid5d.plan.run import examine
from tests.config_kit import CORPUS, OWN_RLINF, needs_corpus
from tests.work import counted

# notes of expected.tsv -> words that the notice must hold
NOTES = {
    "MA actor": "multi-agent actor",
    "MA pads only": "split assertion",
    "dynamic batch": "dynamic batch",
    "bf16 with loss_scale": "bf16 with loss_scale",
    "down_sampling": "down_sampling",
    "optim.min_lr=": "is dead, lr_sched.min_lr",
    "warmup 0.1 iter": "only optimizer step 1",
    "fp16 without loss_scale": "dynamic loss scale",
    "optim.bf16=False and optim.fp16=False": "contradicts precision",
    "second Megatron engine": "second Megatron engine (critic)",
    "logits divided by temperature": "logits divided by temperature",
}


def rows() -> list[dict[str, str]]:
    """The tables' lines; `path` is absolute."""
    tables = [folder / "expected.tsv" for folder in (OWN_RLINF, CORPUS)]
    return [
        {**row, "path": str(path.parent / row["path"])}
        for path in tables
        if path.is_file()
        for row in csv.DictReader(path.open(), delimiter="\t")
    ]


def name(row: dict[str, str]) -> str:
    return "/".join(Path(row["path"]).parts[-2:])


@cache
def translated(path: str) -> Translation:
    return translate(path)


def numbers(result: Translation) -> dict[str, Any]:
    data = result.to_dict()
    layout, batch, optimizer, schedule = (data[k] for k in ("layout", "batch", "optimizer", "schedule"))
    return {
        "world_size": layout["world_size"],
        "tp": layout["tp"],
        "pp": layout["pp"],
        "cp": layout["cp"],
        "dp": layout["dp"],
        "sequence_parallel": str(layout["sequence_parallel"]).lower(),
        "micro_batch": batch["micro_batch_size"],
        "gradient_accumulation_steps": batch["gradient_accumulation_steps"],
        "global_batch": batch["global_batch_size"],
        "zero_stage": data["deepspeed"]["zero_optimization"]["stage"],
        "precision": data["precision"]["dtype"],
        "lr": optimizer["lr"],
        "eps": optimizer["eps"],
        "weight_decay": optimizer["weight_decay"],
        "clip_grad": data["deepspeed"]["gradient_clipping"],
        "lr_decay_style": schedule["style"],
        "lr_decay_iters": schedule["decay_steps"],
        "lr_warmup_iters_effective": schedule["warmup_steps"],
        "min_lr_effective": schedule["min_lr"],
        "seq_length": data["engine"]["seq_length"],
        "betas": ",".join(str(b) for b in optimizer["betas"]),
    }


@pytest.mark.parametrize("row", rows(), ids=name)
def test_verdict_numbers_and_notes(row: dict[str, str]) -> None:
    result = translated(row["path"])
    assert result.verdict == row["expect"], [str(e) for e in result.errors]
    if row["expect"] == "refuse":
        assert row["reason_key"] in [e.key for e in result.errors]
    for number, found in numbers(result).items():
        wanted = row[number]
        try:
            assert float(found) == pytest.approx(float(wanted), rel=1e-9), number
        except ValueError:
            assert str(found) == wanted, number
    data = result.to_dict()
    recompute = data["engine"]["recompute"]
    assert "/".join(str(v) for v in recompute.values()) == row["recompute"]
    if data["batch"]["dynamic"]:
        assert data["batch"]["max_tokens_per_micro_batch"] == int(row["max_tokens_per_mbs"]) * data["layout"]["cp"]
    if row["precision"] == "fp16":
        wanted_scale = "dynamic" if row["loss_scale"] == "-" else float(row["loss_scale"])
        assert data["precision"]["loss_scale"] == wanted_scale
    for note in row["notes"].split(" | "):
        words = next((w for start, w in NOTES.items() if note.startswith(start)), None)
        assert note == "-" or (words and any(words in n for n in result.notices)), (note, result.notices)


def leaves(tree: Any, prefix: str = "") -> list[str]:
    """Written apart from the package's own walk, on plain PyYAML."""
    if not isinstance(tree, dict) or not tree:
        return [prefix]
    return [leaf for name, value in tree.items() for leaf in leaves(value, f"{prefix}.{name}" if prefix else str(name))]


@pytest.mark.parametrize("row", rows(), ids=name)
def test_every_key_is_accounted_for_once(row: dict[str, str]) -> None:
    keys = [e["key"] for e in translated(row["path"]).report]
    assert len(keys) == len(set(keys))
    missing = set(leaves(yaml.safe_load(Path(row["path"]).read_text()))) - set(keys)
    assert not missing
    for entry in translated(row["path"]).report:
        assert entry["disposition"] in ("deepspeed", "engine", "dropped", "overridden", "defaulted") and entry["why"]


def test_dangling_reference_in_a_dropped_key_is_a_notice() -> None:
    result = translated(str(OWN_RLINF / "grpo.yaml"))
    assert any("actor.megatron.ckpt_convertor.hf_model_path" in n and "rollout.path" in n for n in result.notices)


@pytest.mark.parametrize("row", [r for r in rows() if r["expect"] == "translate"], ids=name)
def test_resolved_yaml_is_the_same_run(row: dict[str, str], tmp_path: Path) -> None:
    first = translated(row["path"]).plan
    assert first is not None
    files = plan_files(first)
    (tmp_path / "resolved.yaml").write_text(files["resolved.yaml"])
    again = load_config(tmp_path / "resolved.yaml")
    assert again == first.config
    second, errors = examine(again, first.layout.world_size)
    assert not errors, [str(e) for e in errors]
    for part in (
        "layout",
        "batch",
        "stages",
        "schedule",
        "precision",
        "zero_stage",
        "clip_grad",
        "recompute",
        "deepspeed",
    ):
        assert getattr(second, part) == getattr(first, part)
    assert json.loads(files["layout.json"])["dp"] == first.layout.dp


def test_a_translation_is_little_work() -> None:
    """One reading of the file, one plan; a tenth of a second."""
    _, calls = counted(translate, OWN_RLINF / "grpo.yaml")
    once = ("parse_yaml", "load_yaml", "examine", "plan_batch", "build_schedule", "plan_precision")
    assert {name: calls[name] for name in once} == dict.fromkeys(once, 1)
    assert calls.total() < 300_000


@needs_corpus
def test_the_whole_corpus_was_read() -> None:
    assert len(rows()) == 7 + 40
