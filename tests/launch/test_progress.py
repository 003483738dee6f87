"""A rank that stands still ends the job, with what all ranks do; slow phases that are alive do not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid5d.launch import progress
from hybrid5d.launch.progress import Progress, describe, main_stack
from hybrid5d.launch.watch import FAILED, _sweep
from tests.launch.test_runs import trains, wait
from tests.launch_kit import REPO, TP2, free_port, running, write_run

FULL = pytest.mark.full


class Clock:
    """Stands for time.monotonic."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 1000.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def test_limits_are_learnt_from_steps_and_other_phases_have_ten_times_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, rank = Clock(monkeypatch), Progress(None)
    clock.now += 1e6
    assert rank.overdue is None, "before training, files are read and layers are built"
    rank.note("step 1")
    assert rank.limit == 6000, "the first step may compile"
    clock.now += 100
    rank.note("checkpoint after step 1")
    assert rank.limit == 20000
    clock.now += 19999
    assert rank.overdue is None
    rank.note("step 2")
    assert rank.limit == 2000
    clock.now += 5
    rank.note("step 3")
    clock.now += 1999
    assert rank.limit == 2000 and rank.overdue is None
    clock.now += 2
    assert rank.overdue == 2001


def test_a_stated_limit_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, rank = Clock(monkeypatch), Progress(None, 30.0)
    for step in (1, 2):
        rank.note(f"step {step}")
        clock.now += 29
    assert rank.limit == 30 and rank.overdue is None
    clock.now += 2
    assert rank.overdue == 31
    for _ in range(5):
        rank.note("evaluation after step 2")  # each batch of it
        clock.now += 299
        assert rank.limit == 300 and rank.overdue is None


def test_an_rl_step_has_a_steps_limit_and_its_rollouts_that_of_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybrid5d.train import rl_trainer

    rank, limits = Progress(None, 30.0), []
    result: Any = SimpleNamespace(step=1, metrics={})

    def rows(step: int) -> list[Any]:
        rank.note(f"rollouts of RL step {step + 1}")
        limits.append(rank.limit)
        return []

    def update(rows: list[Any], step: int) -> list[Any]:
        limits.append(rank.limit)
        return [result]

    def nothing(*_: Any) -> None:
        return

    console = SimpleNamespace(step=nothing, say=nothing)
    loop: Any = SimpleNamespace(_rows=rows, note=rank.note, update=SimpleNamespace(run=update), console=console)
    loop._log = nothing
    monkeypatch.setattr(rl_trainer, "replace", lambda found, **_: found)
    for step in range(3):
        rl_trainer.RLTrainer._train(loop, step)
    assert limits == [300, 300, 300, 30, 300, 30]


def test_each_batch_of_an_evaluation_on_its_own_is_progress_within_the_stated_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybrid5d.launch import run
    from hybrid5d.launch.env import LaunchEnv
    from hybrid5d.launch.preflight import Argv, plan_run
    from hybrid5d.launch.watch import Job
    from hybrid5d.train import trainer

    held_out = f"data.val_data_paths=[{tmp_path}/a/rows.jsonl]"
    plan, _ = plan_run(Argv(write_run(tmp_path / "a"), (held_out, "runner.hang_timeout=7")), 1, "eval")
    job, limits = Job(LaunchEnv()), []

    def evaluate(engine: Any, loader: Any, left: Any) -> Any:
        limits.append(job.progress.overdue)
        job.progress.since -= 1e6
        assert left() is False
        limits.append((job.progress.overdue, job.progress.limit, job.progress.watched))
        return trainer.Evaluation(1.0, 2, 3)

    monkeypatch.setattr(trainer, "evaluate", evaluate)
    monkeypatch.setattr(run, "_build", lambda *_, **__: SimpleNamespace(global_step=0))
    monkeypatch.setattr(run, "_resume", lambda *_: SimpleNamespace(source=None))
    assert run.evaluate(job, plan, [], None) == 0
    assert limits == [None, (None, 70.0, True)]


def test_the_odd_ranks_come_first_and_equal_ones_are_one(tmp_path: Path) -> None:
    stopped = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    stopped.send_signal(signal.SIGSTOP)
    try:
        for rank in range(4):
            (tmp_path / f"{rank}.note").write_text("step 7")
            (tmp_path / f"{rank}.pid").write_text(f"{stopped.pid if rank == 2 else os.getpid()} 1")
            if rank in (0, 3):
                (tmp_path / f"{rank}.stack").write_text("  File x\n    wait()")
        time.sleep(0.2)
        lines = describe(tmp_path, range(4)).splitlines()
    finally:
        stopped.kill()
        stopped.wait()
    heads = [line for line in lines if line.startswith("  rank")]
    assert "rank 2: step 7; its process is in state 'stopped' and cannot answer" in "".join(heads[:2])
    assert "rank 1: step 7; it does not answer: one call holds the interpreter" in "".join(heads[:2])
    assert heads[2] == "  ranks 0, 3: step 7" and lines[-1].endswith("wait()")
    assert "test_progress.py" in main_stack()


def test_marks_of_an_earlier_launch_by_the_same_parent_are_removed(tmp_path: Path) -> None:
    own = tmp_path / "hybrid5d-0-1-1"
    own.mkdir()
    for name, age in ((FAILED, 1e6), ("hang", 1e6), ("1.pid", 0.0)):
        (own / name).touch()
        os.utime(own / name, (time.time() - age,) * 2)
    _sweep(own)
    assert [p.name for p in own.iterdir()] == ["1.pid"]


def test_a_pid_file_is_of_the_process_that_started_then(tmp_path: Path) -> None:
    """A rank that runs keeps its file however old it is, and an id that is another process's by now is not ended."""
    own = tmp_path / "hybrid5d-0-1-1"
    own.mkdir()
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        (own / "1.pid").write_text(f"{other.pid} {progress.started_at(other.pid)}")
        os.utime(own / "1.pid", (time.time() - 1e6,) * 2)
        _sweep(own)
        assert [p.name for p in own.iterdir()] == ["1.pid"]
        (own / "1.pid").write_text(f"{other.pid} 12345")
        progress.end_processes(own)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.5)
        (own / "1.pid").write_text(f"{other.pid} {progress.started_at(other.pid)}")
        progress.end_processes(own)
        assert other.wait(5) == -signal.SIGKILL
    finally:
        other.kill()


@pytest.mark.timeout(200)
@FULL
@pytest.mark.parametrize("who, backend", [(1, "shm"), (0, "gloo"), (1, "gloo")])
def test_a_stopped_rank_ends_the_job(tmp_path: Path, who: int, backend: str) -> None:
    """SIGSTOP to one of two: the other tells and both end; with shared memory before the limit is reached."""
    path, port, ranks = write_run(tmp_path / "a"), str(free_port()), []
    for rank in range(2):
        environ = {
            "RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "DS_ACCELERATOR": "cpu", "TMPDIR": tmp_path, "PATH": os.environ["PATH"],
        }  # fmt: skip
        words = [sys.executable, "-m", "hybrid5d.worker", "--config", str(path), TP2]
        words += ["runner.max_steps=1000000", "runner.hang_timeout=6", f"runner.cpu_backend={backend}"]
        ranks.append(subprocess.Popen(
            words, env={k: str(v) for k, v in environ.items()}, text=True, cwd=REPO, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        ))  # fmt: skip
    try:
        wait(lambda: trains(tmp_path / "a" / "run") or any(r.poll() is not None for r in ranks), 120)
        time.sleep(1)
        ranks[who].send_signal(signal.SIGSTOP)
        text = ranks[1 - who].communicate(timeout=60)[1]
        assert ranks[who].wait(timeout=10) == -signal.SIGKILL
    finally:
        for rank in ranks:
            rank.kill()
    lines = text.splitlines()
    assert ranks[1 - who].returncode == 1, text
    if backend == "shm":
        assert f"rank {who} " in lines[0] and lines[0].endswith("is stopped")
        return
    assert "no progress for " in lines[0] and "(runner.hang_timeout), in step" in lines[0]
    assert lines[1].startswith(f"  rank {who}: step") and "'stopped'" in lines[1]
    assert lines[2].startswith(f"  rank {1 - who}: step") and len(lines) <= 200
    wait(lambda: not running(str(path)), 60)
