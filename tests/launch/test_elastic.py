"""`train --elastic`: as many processes as there are, the same rows and losses (F11 of failures seen elsewhere)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hybrid5d.launch import elastic as module
from hybrid5d.launch import restart
from hybrid5d.launch.preflight import Argv
from tests.cli_kit import hybrid5d
from tests.launch_kit import PP2, REPO, TP2, metrics, write_run

TRAIN = [sys.executable, "-m", "hybrid5d", "train"]


def test_the_layout_is_said_and_started(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a")
    done = hybrid5d("train", path, TP2, PP2, "--elastic", "--num-procs", "7", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "elastic: 4 processes, tp 2 x cp 1 x dp 1 x pp 2 (the YAML's own degrees)" in done.stderr
    assert "3 of 7 processes stay idle" in done.stderr and "would start 4 processes" in done.stdout
    done = hybrid5d("train", path, TP2, PP2, "--elastic", "--num-procs", "2", "--dry-run")
    assert "actor.model.pipeline_model_parallel_size=1" in done.stderr and "would start 2 processes" in done.stdout


@pytest.mark.parametrize(
    "words, line",
    [
        ((), "--elastic=True: without GPUs the number of processes must be said. Fix: add --num-procs N"),
        (
            ("--num-procs", "2", "actor.global_batch_size=null"),
            "actor.global_batch_size=None: null is micro_batch_size x",
        ),
        (("--num-procs", "2", "actor.deepspeed.elasticity.enabled=true"), "actor.deepspeed.elasticity.enabled=True"),
        (("--num-procs", "2", "actor.optim.lrr=1"), "actor.optim.lrr"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path: Path, words: tuple[str, ...], line: str) -> None:
    done = hybrid5d("train", write_run(tmp_path / "a"), *words, "--elastic", "--dry-run")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and line in done.stderr, done.stderr


def test_gpus_are_counted_as_they_are_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,GPU-1234,3")
    assert module._gpus() == 3
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).write_text("")
    about = tmp_path / "0000:01:00.0" / "information"
    about.parent.mkdir()
    about.write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 1\n")
    monkeypatch.setattr(module, "_DEVICES", tmp_path)
    monkeypatch.setattr(module, "_CARDS", tmp_path)
    card = module._card()
    assert module._gpus() == 2 and card is not None and card.name == "h100"
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert module._gpus() == 0 and module._card() is None


def test_each_restart_asks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card is lost with each death: the next start has a layout for those that are left."""
    path, counts, started = write_run(tmp_path / "a"), [4, 3, 1], list[tuple[int, bool]]()
    monkeypatch.setattr(module, "_gpus", lambda: counts.pop(0))
    monkeypatch.setattr(restart, "_sleep", lambda seconds: None)

    def launch(argv: Argv, count: int, *_: object, **__: object) -> int:
        started.append((count, "actor.model.tensor_model_parallel_size=1" in argv.overrides))
        return 1 if counts else 0

    monkeypatch.setattr(restart, "launch", launch)
    assert restart.supervise(Argv(path, (TP2,)), None, None, 5, fits=True) == 0
    assert started == [(4, False), (2, False), (1, True)]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_fewer_and_more_processes_train_as_the_unbroken_run(tmp_path: Path) -> None:
    """tp 2 x dp 2, then 3 processes in mid epoch (one idles), 1, and 4 again: rows, losses and norms of one run."""

    def start(folder: Path, *words: str) -> None:
        done = subprocess.run([*TRAIN, *words], capture_output=True, text=True, cwd=REPO, timeout=300)
        assert done.returncode == 0, done.stderr

    start(tmp_path / "a", str(write_run(tmp_path / "a")))
    path = str(write_run(tmp_path / "b"))
    for step, count in enumerate((4, 3, 1, 4), 1):
        words = [f"runner.max_steps={step}", "runner.save_interval=1", "runner.resume_dir=auto"]
        start(tmp_path / "b", path, TP2, "--elastic", "--num-procs", str(count), *words)
    one, several = metrics(tmp_path / "a" / "run"), metrics(tmp_path / "b" / "run")
    assert len(one) == len(several) == 4
    for a, b in zip(one, several):
        assert a["rows_seen"] == b["rows_seen"] and a["lr"] == b["lr"]
        assert abs(a["loss"] - b["loss"]) < 1e-5 and abs(a["grad_norm"] / b["grad_norm"] - 1) < 1e-5
