"""`hybrid5d env`: facts that can be asked elsewhere too."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

import pytest
import torch

from hybrid5d.launch import machine
from tests.cli_kit import REPO, hybrid5d


def test_it_says_what_is_installed_and_usable() -> None:
    done = hybrid5d("env", "--format", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["packages"]["deepspeed"] == metadata.version("deepspeed")
    assert found["torch"]["version"] == torch.__version__ and found["device"] in ("cpu", "cuda")
    assert found["collectives"]["gloo"] == "usable"
    assert found["extras"]["hf"] == "installed"
    if found["device"] == "cpu":
        assert found["gpus"] == [] and found["precisions"]["fp16"] == "not on a CPU"
        assert found["attention_kernels"]["bf16"][0] == "aten_cpu"
    text = hybrid5d("env").stdout
    assert f"  deepspeed     {metadata.version('deepspeed')}" in text
    assert {line.partition(":")[0] for line in text.splitlines() if not line.startswith(" ")} == set(found)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version

    def without(name: str) -> str:
        if name == "math-verify":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(machine.metadata, "version", without)
    assert machine.extras()["rl"] == "missing: math-verify"
    assert machine.extras()["hf"] == "installed"


@pytest.mark.full
def test_standard_output_is_json_only() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hybrid5d", "env", "--format", "json"], cwd=REPO, capture_output=True, text=True
    )
    assert done.returncode == 0 and json.loads(done.stdout)["python"]
