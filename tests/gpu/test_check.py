"""The parts of `make gpu-check` without a GPU: on the CPU, and with stand-ins for what passes, fails and hangs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.gpu import check
from tests.gpu.check import PARTS, PROFILE, TRAININGS, Check, checks, main, run

FULL = pytest.mark.full  # a start costs 15 s of a core


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith(("LOCAL_", "RANK", "WORLD_SIZE", "MASTER_"))]:
        monkeypatch.delenv(name)  # of other tests' engines
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_a_machine_without_gpus_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(0, tmp_path, checks()) == 2
    assert "no GPU here" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_it_goes_on_after_failures_and_writes_all_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hang = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    todo = [
        Check("raises", 1, ("-c", "print('before'); raise ValueError('wrong numbers')")),
        Check("hangs", 1, ("-c", hang), 2.0),
        Check("four", 4, ("-c", "")),
        Check("good", 1, ("-c", "print('RESULT 7 of 7'); print('noise')")),
    ]
    assert main(2, tmp_path, todo) == 1
    record = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [(o["name"], o["result"], o["detail"]) for o in record["checks"]] == [
        ("raises", "fail", "ValueError: wrong numbers"), ("hangs", "fail", "not over after 2 s"),
        ("four", "not run", "needs 4 GPUs, 2 here"), ("good", "pass", "7 of 7"),
    ]  # fmt: skip
    assert "7 of 7" in capsys.readouterr().out
    assert main(1, tmp_path, todo[-1:]) == 0


def test_every_check_names_a_part_that_exists() -> None:
    todo = checks()
    assert len({c.name for c in todo}) == len(todo) >= 18
    assert sum(c.limit_s for c in todo if c.gpus == 1) <= 9 * 60
    for c in todo:
        words = dict(zip(c.words[2::2], c.words[3::2])) if "--part" in c.words else {}
        assert not words or words["--part"] in {*PARTS, "train"}
        if "--training" in words:
            training = TRAININGS[words["--training"]]
            sizes = [training.layout.get(axis, 1) for axis in ("tp", "pp", "cp", "dp")]
            assert c.gpus == training.ranks == sizes[0] * sizes[1] * sizes[2] * sizes[3]


@pytest.mark.full
@pytest.mark.parametrize("name", ["fp32", "bf16 packed rows", "tp2 sp"])
def test_trainings_on_the_cpu(name: str) -> None:
    (asked,) = [c for c in checks() if c.name == f"training: {name}"]
    outcome = run(asked, asked.gpus)
    assert outcome.result == "pass", outcome
    assert "of one CPU process, attention aten_cpu" in outcome.detail


def test_the_loss_and_the_speed_on_the_cpu(tmp_path: Path) -> None:
    assert check.loss("cpu").startswith("common factor off by")
    assert "tokens/s" in check.speed("cpu", 64, 64, tmp_path)
    assert json.loads((tmp_path / PROFILE).read_text())["traceEvents"]
