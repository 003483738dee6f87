"""A run folder and its lock: one run at a time, nothing of an earlier run overwritten."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid5d.errors import CheckpointError, ConfigErrors
from hybrid5d.load import load_config
from hybrid5d.plan.run import RunPlan, build_plan
from hybrid5d.train import lock as locks
from hybrid5d.train.lock import LOCK, take
from hybrid5d.train.run_folder import METRICS, RESULT, RunFolder
from tests.launch_kit import REPO, write_run

HOLD = """
import sys, time
from pathlib import Path
from hybrid5d.train.lock import take
take(Path(sys.argv[1]), sys.argv[2], under_launcher=sys.argv[3] == "yes")
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holders() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def hold(started: list[subprocess.Popen[str]], folder: Path, role: str, under: str = "no") -> subprocess.Popen[str]:
    words = [sys.executable, "-c", HOLD, str(folder), role, under]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=REPO)
    started.append(process)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize("role", ["launcher", "rank 0"])
@pytest.mark.parametrize("second", ["launcher", "rank 0"])
def test_a_second_run_is_refused_and_a_lock_ends_with_its_process(
    tmp_path: Path, holders: list[subprocess.Popen[str]], role: str, second: str
) -> None:
    process = hold(holders, tmp_path, role)
    with pytest.raises(ConfigErrors) as refused:
        take(tmp_path, second)  # type: ignore[arg-type]
    text = str(refused.value)
    assert f"pid {process.pid} on {socket.gethostname()}, since 20" in text and text.startswith("runner.output_dir=")
    process.send_signal(signal.SIGKILL)
    process.wait()
    lock = take(tmp_path, second)  # type: ignore[arg-type]
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    lock.release()
    assert (tmp_path / LOCK).read_text() == ""


def test_rank_0_shares_the_folder_with_its_launcher_and_keeps_it_when_that_dies(
    tmp_path: Path, holders: list[subprocess.Popen[str]]
) -> None:
    launcher = hold(holders, tmp_path, "launcher")
    rank = hold(holders, tmp_path, "rank 0", "yes")
    launcher.kill()
    launcher.wait()
    with pytest.raises(ConfigErrors, match=f"pid {rank.pid} "):
        take(tmp_path, "launcher")


def test_a_record_left_by_a_dead_process_of_this_host_is_taken_over(
    tmp_path: Path, holders: list[subprocess.Popen[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    process = hold(holders, tmp_path, "launcher")
    process.kill()
    process.wait()
    take(tmp_path, "launcher").release()
    assert f"was left locked by pid {process.pid} on {socket.gethostname()}, which is gone" in capfd.readouterr().err


@pytest.mark.parametrize("alive", [False, True])
def test_a_record_of_another_host_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alive: bool) -> None:
    """Where locks do not reach from host to host, the beat of the holder does."""
    monkeypatch.setattr(locks, "WATCH_SECONDS", 20.0 if alive else 1.0)
    monkeypatch.setattr(locks, "BEAT_SECONDS", 0.2)
    record = {"pid": 7, "host": "elsewhere", "started": "2026-01-01", "beat": 0}
    path = tmp_path / LOCK
    path.write_text(json.dumps(record))
    if alive:  # in a process of its own: closing the file here would drop the locks of this one
        code = f"import json, os, time\np={str(path)!r}\nn=0\nwhile True:\n time.sleep(.1); n += 1\n" + (
            f" open(p, 'r+').write(json.dumps({{**{record!r}, 'beat': n}}))\n"
        )
        other = subprocess.Popen([sys.executable, "-c", code])
        try:
            while json.loads(path.read_text())["beat"] == 0:
                time.sleep(0.05)
            with pytest.raises(ConfigErrors, match="pid 7 on elsewhere"):
                take(tmp_path, "launcher")
        finally:
            other.kill()
            other.wait()
    else:
        take(tmp_path, "launcher").release()


def test_a_holder_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "BEAT_SECONDS", 0.05)
    lock = take(tmp_path, "launcher")
    seen = set()
    deadline = time.monotonic() + 20
    while len(seen) < 3 and time.monotonic() < deadline:
        seen.add(os.pread(lock.handle, 4096, 0))
        time.sleep(0.05)
    lock.release()
    assert len(seen) >= 3 and all(json.loads(text)["pid"] == os.getpid() for text in seen)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigErrors, match=r"runner\.output_dir=.*cannot be written"):
        take(tmp_path / "file" / "run", "launcher")


# --- what an earlier run left ---------------------------------------------------------------------------------------


def plan_of(folder: Path, *words: str) -> RunPlan:
    path = folder / "run.yaml"
    return build_plan(load_config(path if path.exists() else write_run(folder), words), 1)


def leave_a_run(folder: RunFolder) -> None:
    (folder / "checkpoints" / "global_step_4").mkdir(parents=True)
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text("{}")
    (folder / METRICS).write_text('{"step": 4, "loss": 1.5}\n')
    folder.write_result({"exit_code": 0, "steps": 4, "loss": 1.5, "hf": "there"})


def test_a_fresh_start_keeps_an_earlier_run_aside_whole(tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "a")
    folder = RunFolder.of(plan)
    assert folder.prepare(plan) == []
    assert folder.prepare(plan) == [], "settings alone are no run"
    folder.write_refusal()
    assert folder.prepare(plan) == [] and folder.exit_code() is None, "nor are those of a start that was refused"
    for number in (1, 2):
        settings = (folder / "resolved.yaml").read_text()
        leave_a_run(folder)
        (notice,) = folder.prepare(plan_of(tmp_path / "a", "actor.optim.lr=0.5"))
        assert notice == f"{folder.path}: what an earlier run left there is kept in earlier-{number}/"
        aside = RunFolder(folder / f"earlier-{number}")
        assert aside.exit_code() == 0 and (aside / METRICS).exists() and (aside / "hf" / "config.json").exists()
        assert (aside / "checkpoints" / "global_step_4").is_dir()
        assert (aside / "resolved.yaml").read_text() == settings
        assert folder.exit_code() is None and not (folder / "checkpoints").exists() and not (folder / METRICS).exists()


@pytest.mark.parametrize("name", ["checkpoints", "hf", METRICS])
def test_what_a_killed_run_left_is_kept_aside(tmp_path: Path, name: str) -> None:
    """It has no result, and perhaps only one of these."""
    plan = plan_of(tmp_path / "a")
    folder = RunFolder.of(plan)
    folder.prepare(plan)
    (folder / name).write_text("") if name == METRICS else (folder / name).mkdir()
    assert folder.prepare(plan) == [f"{folder.path}: what an earlier run left there is kept in earlier-1/"]
    assert (folder / "earlier-1" / name).exists() and not (folder / name).exists()


def test_a_start_from_elsewhere_is_a_fresh_one_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.checkpoint.test_manifest import put

    plan = plan_of(tmp_path / "a", f"runner.resume_dir={put(tmp_path / 'b', 'global_step_1')}")
    leave_a_run(RunFolder.of(plan))
    assert len(RunFolder.of(plan).prepare(plan)) == 1


def test_a_source_without_the_critic_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    from dataclasses import replace

    from tests.checkpoint.test_manifest import put

    plan = plan_of(tmp_path / "a", f"runner.resume_dir={put(tmp_path / 'b', 'global_step_1')}")
    folder = RunFolder.of(plan)
    assert folder.source(plan) is not None
    leave_a_run(folder)
    with pytest.raises(CheckpointError, match="holds no critic, which this run trains"):
        folder.prepare(replace(plan, critic=plan))
    assert folder.exit_code() == 0 and not (folder / "resolved.yaml").exists()


def test_resuming_here_moves_nothing_and_knows_the_earlier_result(tmp_path: Path) -> None:
    from tests.checkpoint.test_manifest import put

    plan = plan_of(tmp_path / "a", "runner.resume_dir=auto")
    folder = RunFolder.of(plan)
    leave_a_run(folder)
    with pytest.raises(CheckpointError, match="none is whole"):
        folder.prepare(plan)
    assert folder.exit_code() == 0 and not (folder / "resolved.yaml").exists(), "nothing was touched"
    put(folder / "checkpoints", "global_step_3")
    assert folder.prepare(plan) == [] and (folder / METRICS).exists() and folder.exit_code() is None
    assert folder.earlier_result(3) is None
    assert folder.earlier_result(4) == {"exit_code": 0, "steps": 4, "loss": 1.5, "hf": "there"}
    assert folder.last_loss(4) == 1.5 and folder.last_loss(3) is None
    folder.write_result({"exit_code": 0, "steps": 5})
    assert folder.earlier_result(4) is None
    assert json.loads((folder / RESULT).read_text()) == {"exit_code": 0, "steps": 5}


def test_checkpoints_of_a_branch_that_is_left_go_aside(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (2, 4, 6):
        (folder / "checkpoints" / f"global_step_{step}").mkdir(parents=True)
    assert folder.keep_later(6) == []
    assert folder.keep_later(2) == [f"{tmp_path}: checkpoints after step 2 are kept in earlier-1/"]
    names = sorted(p.name for p in (folder / "earlier-1" / "checkpoints").iterdir())
    assert names == ["global_step_4", "global_step_6"]
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["global_step_2"]
