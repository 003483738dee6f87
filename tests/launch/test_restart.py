"""`--restarts N`: a run that dies goes on from its newest whole checkpoint, and gives up where it gets nowhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from hybrid5d.errors import ConfigErrors
from hybrid5d.launch import restart
from hybrid5d.launch.preflight import Argv
from hybrid5d.launch.restart import Deaths, newest_whole
from hybrid5d.train.run_folder import RunFolder
from tests.checkpoint.test_retention import put
from tests.launch.test_runs import TRAIN, wait
from tests.launch_kit import REPO, metrics, write_run


@pytest.mark.parametrize("code", [0, 2, 3])
def test_what_ended_was_refused_or_stopped_is_not_started_again(code: int) -> None:
    assert Deaths(5, None).wait(code, None) is None


def test_deaths_without_progress_are_counted_and_progress_sets_the_count_back() -> None:
    deaths = Deaths(2, "a")
    assert [deaths.wait(1, "a"), deaths.wait(137, "a")] == [1, 2]
    assert [deaths.wait(1, "b"), deaths.wait(1, "b")] == [1, 2], "a new whole checkpoint"
    assert deaths.wait(1, "b") is None and deaths.count == 3
    patient = Deaths(100, None)
    assert [patient.wait(1, None) for _ in range(9)] == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_only_a_whole_checkpoint_is_progress(tmp_path: Path) -> None:
    folder, root = RunFolder(tmp_path), tmp_path / "checkpoints"
    assert newest_whole(folder) is None
    first = put(root, 2, "")
    (put(root, 4, "2") / "actor" / "a").unlink()
    before = newest_whole(folder)
    assert before == f"{first / 'actor'}:2"
    put(root, 6, "2")
    assert newest_whole(folder) not in (None, before)


@pytest.mark.timeout(300)
@pytest.mark.full
def test_a_killed_run_goes_on_and_a_stopped_one_does_not(tmp_path: Path) -> None:
    """One process: SIGKILL after a checkpoint, and every step is there once; then SIGTERM: code 3, no other start."""
    path, run = write_run(tmp_path / "a"), tmp_path / "a" / "run"
    words = [*TRAIN, str(path), "--restarts", "2", "runner.max_steps=1000000", "runner.save_interval=5"]
    words += ["runner.keep_last=2", "actor.lr_sched.lr_decay_iters=1000000"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPO)
    try:
        wait(lambda: (run / "checkpoints" / "latest").exists(), 120)
        (rank,) = [p for p in psutil.Process(process.pid).children() if "hybrid5d.worker" in p.cmdline()]
        rank.kill()
        done = metrics(run)[-1]["step"]
        wait(lambda: metrics(run)[-1]["step"] > done + 20 or process.poll() is not None, 120)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 3, err
    assert err.count("restart 1, in 1 s, from the newest whole checkpoint") == 1 and "restart 2" not in err
    assert "resumed from" in out
    steps = [m["step"] for m in metrics(run)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(list((run / "checkpoints").glob("global_step_*"))) <= 2 and not list((run / "checkpoints").glob("*.tmp"))


@pytest.mark.timeout(200)
def test_a_run_that_gets_nowhere_is_given_up(tmp_path: Path) -> None:
    """Its ranks die before any checkpoint, each time."""
    path, own = write_run(tmp_path / "a"), tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text(
        "import os, sys\nif 'hybrid5d.worker' in ' '.join(sys.orig_argv): os._exit(9)\n"
    )
    done = subprocess.run(
        [*TRAIN, str(path), "--restarts", "1"], capture_output=True, text=True, timeout=150, cwd=REPO, check=False,
        env={**os.environ, "PYTHONPATH": str(own)},
    )  # fmt: skip
    assert done.returncode == 9 and sys.executable
    lines = [line for line in done.stderr.splitlines() if "start" in line]
    assert lines.pop(0).startswith("notice: runner.save_interval=-1 saves nothing")
    assert lines[0] == "restart 1, in 1 s, from where it began: there is no whole checkpoint"
    assert lines[-1] == "no further start: ended 2 times with no new whole checkpoint (--restarts 1)"


def test_a_run_that_was_to_stop_is_not_started_again_whatever_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that misses the grace ends with 1 or 137; torchrun makes 1 of every code."""
    path, codes = write_run(tmp_path / "a"), [1, 137, 0]

    def launch(*_: Any, stopped: threading.Event) -> int:
        if len(codes) == 2:
            stopped.set()
        return codes.pop(0)

    monkeypatch.setattr(restart, "launch", launch)
    monkeypatch.setattr(restart, "_sleep", lambda seconds: None)
    assert restart.supervise(Argv(path, ()), None, None, 5) == 137 and codes == [0]


def test_restarts_without_checkpoints_are_said_and_a_wrong_start_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path / "a")
    monkeypatch.setattr(restart, "launch", lambda *_, **__: 0)
    assert restart.supervise(Argv(path, ("runner.save_interval=2",)), None, None, 5) == 0
    assert capfd.readouterr().err == ""
    assert restart.supervise(Argv(path, ()), None, None, 5) == 0
    assert "runner.save_interval=-1 saves nothing: every start of --restarts 5 begins anew" in capfd.readouterr().err
    with pytest.raises(ConfigErrors, match="--launcher"):
        restart.supervise(Argv(path, ()), None, "slurm", 5)
