"""Runs under the real launchers: the same numbers from each, and an end to every kind of failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.launch_kit import CP2, PP2, TP2, Ended, launcher, metrics, run, running, write_run

pytestmark = pytest.mark.timeout(900)  # each starts a launcher and fresh interpreters
FULL = pytest.mark.full
SAME = ("step", "lr", "valid_tokens", "tokens", "rows_seen")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain python, one process, with a stale lock where DeepSpeed would build its shared-memory op."""
    folder = tmp_path_factory.mktemp("one")
    extensions = folder / "ext" / f"py3{sys.version_info.minor}_cpu" / "deepspeed_shm_comm"
    extensions.mkdir(parents=True)
    (extensions / "lock").touch()
    path = write_run(folder / "a")
    ended = run([*launcher("python", 1), "--config", str(path)], TORCH_EXTENSIONS_DIR=str(folder / "ext"))
    assert ended.code == 0, ended.err
    assert ended.err == "" and ended.out.startswith("hybrid5d "), "DeepSpeed's lines are not shown, ours come first"
    return folder / "a" / "run"


@pytest.mark.parametrize(
    "name, words",
    [
        ("deepspeed", [TP2, f"{TP2[:12]}sequence_parallel=true"]),
        pytest.param("accelerate", [], marks=FULL),
        pytest.param("torchrun", [CP2], marks=FULL),
    ],
)
def test_every_launcher_gives_the_same_run(one_process: Path, tmp_path: Path, name: str, words: list[str]) -> None:
    """Loss, lr per optimizer step (gas 8 and 4), rows and token counts do not depend on the launcher."""
    path = write_run(tmp_path / "a")
    ended = run([*launcher(name, 2), "--config", str(path), *words, "actor.optim.lr=1e-2"])
    assert ended.code == 0, ended.err
    folder = tmp_path / "a" / "run"
    got, want = metrics(folder), metrics(one_process)
    assert [{k: g[k] for k in SAME} for g in got] == [{k: w[k] for k in SAME} for w in want]
    for g, w in zip(got, want):
        assert g["loss"] == pytest.approx(w["loss"], abs=1e-5)
        assert g["grad_norm"] == pytest.approx(w["grad_norm"], rel=1e-5)
    assert [g["lr"] for g in got] == pytest.approx([0.0, 5e-3, 1e-2, 5.5e-3])
    _check_output(ended, folder)


def _check_output(ended: Ended, folder: Path) -> None:
    """Each line once, whole, without control codes; the run directory is complete."""
    assert "\r" not in ended.out and "\x1b" not in ended.out
    steps = [line for line in ended.out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1/4", "2/4", "3/4", "4/4"]
    assert ended.out.count("data: ") == 1 and ended.told == []
    for name in ("resolved.yaml", "ds_config.json", "layout.json", "env.json", "result.json"):
        assert (folder / name).is_file(), name


@FULL
def test_resolved_yaml_is_the_same_run_and_train_wraps_the_launcher(one_process: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "hybrid5d", "train", str(one_process / "resolved.yaml"), "--num-procs", "2"]
    ended = run([*words, "--launcher", "torchrun", f"runner.output_dir={tmp_path}", PP2])
    assert ended.code == 0, ended.err
    assert [m["loss"] for m in metrics(tmp_path / "run")] == pytest.approx(
        [m["loss"] for m in metrics(one_process)], abs=1e-5
    )


@pytest.mark.parametrize("name", ["deepspeed", pytest.param("torchrun", marks=FULL)])
def test_a_refusal_is_told_once(tmp_path: Path, name: str) -> None:
    """Four ranks, one message."""
    path = write_run(tmp_path / "a")
    ended = run([*launcher(name, 4), "--config", str(path), f"{TP2[:-1]}8", "actor.optim.clip_grad=-1"])
    assert ended.code == (2 if name == "deepspeed" else 1)  # torchrun returns 1 for whatever its ranks return
    assert ended.err.count("clip_grad=-1: ") == 1 and "[rank" not in ended.err


@pytest.mark.parametrize(
    "name, fault, told",
    [
        ("deepspeed", "raise", "ValueError: the reason"),
        pytest.param("deepspeed", "exit0", "left early with exit code 0", marks=FULL),
        pytest.param("deepspeed", "kill", "the process is gone", marks=FULL),
        pytest.param("torchrun", "vanish", "the process is gone", marks=FULL),
    ],
)
def test_a_rank_that_dies_ends_the_job(tmp_path: Path, name: str, fault: str, told: str) -> None:
    """The dead rank and its reason come first; all end by themselves; exit code not 0; no result."""
    path = write_run(tmp_path / "a")
    entry = launcher(name, 4, "tests/launch/faulty_train.py")
    ended = run([*entry, "--config", str(path), TP2, PP2, "runner.max_steps=1000"], FAULT=fault)
    assert ended.code != 0
    assert ended.told[0].startswith(f"[rank 3] step 2: {told}"), ended.err
    _wait(lambda: running(str(path)) == [], 60)
    assert not (tmp_path / "a" / "run" / "result.json").exists()


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGKILL])
@FULL
def test_ranks_do_not_outlive_the_launcher(tmp_path: Path, sig: signal.Signals) -> None:
    """`timeout deepspeed ...` ends the runner and leaves its inner process and the ranks; ours notice and stop."""
    path = write_run(tmp_path / "a")
    words = [*launcher("deepspeed", 2), "--config", str(path), TP2, "runner.max_steps=100000"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = tmp_path / "a" / "run" / "metrics.jsonl"
    try:
        _wait(lambda: lines.exists() and lines.stat().st_size > 0, 300)
        process.send_signal(sig)
        process.wait(60)
        _wait(lambda: running(str(path)) == [], 120)
    finally:
        for pid in running(str(path)):
            os.kill(pid, signal.SIGKILL)


def _wait(condition: object, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.2)


@FULL
def test_sigusr1_saves_and_sigterm_saves_and_stops(tmp_path: Path) -> None:
    """Told to `hybrid5d train`, done by all ranks, under a launcher that passes neither on; code 3, then resumed."""
    path = write_run(tmp_path / "a")
    words = [sys.executable, "-m", "hybrid5d", "train", str(path), "--num-procs", "2", "--launcher", "deepspeed"]
    words += [TP2, "runner.max_steps=100000", "runner.save_interval=100000"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    folder = tmp_path / "a" / "run"
    try:
        _wait(lambda: (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size > 0, 300)
        process.send_signal(signal.SIGUSR1)
        _wait(lambda: (folder / "checkpoints" / "latest").exists(), 300)
        first = len(metrics(folder))
        _wait(lambda: len(metrics(folder)) > first + 2, 300)
        process.terminate()
        _, told = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 3, told
    result = json.loads((folder / "result.json").read_text())
    assert result["exit_code"] == 3 and result["steps"] == len(metrics(folder)) > first
    saved = {p.name for p in (folder / "checkpoints").glob("global_step_*")}
    assert len(saved) == 2 and Path(result["checkpoint"]).name == f"global_step_{result['steps']}" in saved
    assert "[rank" not in told
    _wait(lambda: running(str(folder)) == [], 120)
    more = [*words, "runner.resume_dir=auto", f"runner.max_steps={result['steps'] + 1}"]
    ended = run(more)
    assert ended.code == 0 and f"resumed from {result['checkpoint']}" in ended.out, ended.err
    assert json.loads((folder / "result.json").read_text())["exit_code"] == 0


@FULL
def test_a_lost_run_is_never_reported_as_done(tmp_path: Path) -> None:
    """`deepspeed` returns 0 when its inner process is killed, `hybrid5d train` does not; the ranks save and leave."""
    path = write_run(tmp_path / "a")
    words = [sys.executable, "-m", "hybrid5d", "train", str(path), "--num-procs", "2", "--launcher", "deepspeed"]
    process = subprocess.Popen([*words, TP2, "runner.max_steps=100000"], stderr=subprocess.PIPE, text=True)
    lines, mark = tmp_path / "a" / "run" / "metrics.jsonl", str(tmp_path / "a" / "run")
    try:
        _wait(lambda: lines.exists() and lines.stat().st_size > 0, 300)
        for pid in running("deepspeed.launcher.launch"):
            if mark in " ".join(psutil.Process(pid).cmdline()):
                os.kill(pid, signal.SIGKILL)
        _, told = process.communicate(timeout=240)
        assert process.returncode == 1 and "the launcher is gone" in told
        result = json.loads((tmp_path / "a" / "run" / "result.json").read_text())
        assert (
            result["exit_code"] == 1
            and Path(result["checkpoint"]).is_dir()
            and result["steps"] == len(metrics(lines.parent))
        )
        _wait(lambda: running(mark) == [], 120)
    finally:
        for pid in running(mark):
            os.kill(pid, signal.SIGKILL)


@FULL
def test_eval_verb_gives_the_loss_of_the_start_weights(one_process: Path, tmp_path: Path) -> None:
    rows = one_process.parent / "rows.jsonl"
    words = [sys.executable, "-m", "hybrid5d", "eval", str(one_process / "resolved.yaml"), "--num-procs", "2"]
    changes = [f"data.val_data_paths=[{rows}]", "data.train_data_paths=null", f"runner.output_dir={tmp_path}"]
    ended = run([*words, "--launcher", "torchrun", TP2, *changes])
    assert ended.code == 0, ended.err
    found = json.loads((tmp_path / "run" / "eval" / "result.json").read_text())
    assert found["rows"] == 24 and f"loss {found['loss']:.4f}" in ended.out
    whole = write_run(tmp_path / "whole")  # the same rows as one training step: its loss is of the start weights, too
    words = ["actor.global_batch_size=24", "runner.max_steps=1", f"data.train_data_paths=[{rows}]"]
    ended = run([*launcher("python", 1), "--config", str(whole), *words])
    assert ended.code == 0, ended.err
    (step,) = metrics(tmp_path / "whole" / "run")
    assert len(step["rows_seen"]) == 24 and found["loss"] == pytest.approx(step["loss"], abs=1e-5)
