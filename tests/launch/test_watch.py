"""Ranks of one node that watch each other, without a process group."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybrid5d.errors import ConfigError, ConfigErrors
from hybrid5d.launch.env import LaunchEnv
from hybrid5d.launch.watch import Job, _started, _sweep


def job(tmp_path: Path, rank: int, world: int = 4) -> Job:
    found = Job(LaunchEnv(rank, world, rank, world), tmp_path)
    found._make_folder()
    return found


def test_the_first_failure_speaks_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ranks = [job(tmp_path, r) for r in range(4)]
    ranks[3].where = ranks[1].where = "step 2"
    assert ranks[3].fail(ValueError("bad row\nmore")) == 1
    assert ranks[1].fail(RuntimeError("Connection closed by peer")) == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "[rank 3] step 2: ValueError: bad row"
    assert not any("rank 1" in line or "Connection" in line for line in lines)


def test_a_rank_that_vanished_is_named_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gone = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    ranks = [job(tmp_path, r) for r in range(4)]
    for r in ranks:
        pid = gone.pid if r.env.rank == 3 else os.getpid()
        (r.folder / f"{r.env.rank}.pid").write_text(f"{pid} {_started(pid)}")
    assert ranks[0].gone() == []
    gone.kill()
    deadline = time.monotonic() + 10
    while ranks[0].gone() != [3] and time.monotonic() < deadline:  # before it is waited for: a zombie counts as gone
        time.sleep(0.01)
    ranks[1].where = "step 5"
    ranks[1].fail(RuntimeError("Connection closed by peer"))
    gone.wait()
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("[rank 3] step 5: the process is gone")
    assert lines[1].startswith("[rank 1] step 5: RuntimeError")
    (ranks[3].folder / "3.done").touch()
    assert ranks[0].gone() == [], "a rank that finished may go"


def test_leaving_early_with_code_0_is_a_failure(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert job(tmp_path, 2).fail(SystemExit(0)) == 1
    assert capfd.readouterr().err == "[rank 2] start: left early with exit code 0\n"


def test_a_refusal_is_told_once_by_rank_0(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    refusal = ConfigErrors([ConfigError("a", 1, "no"), ConfigError("b", 2, "no")])
    assert [job(tmp_path, r).fail(refusal) for r in range(4)] == [2] * 4
    assert capfd.readouterr().err == "a=1: no\nb=2: no\n"


def test_what_only_another_rank_refuses_is_told_with_its_number(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid5d.launch.watch.GRACE_SECONDS", 0.2)
    job(tmp_path, 2).fail(ConfigErrors([ConfigError("a", 1, "no"), ConfigError("b", 2, "no")]))
    assert capfd.readouterr().err == "[rank 2] a=1: no\n[rank 2] b=2: no\n"


def test_a_warning_is_printed_once_with_the_rank_that_had_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for rank, text in ((2, "low disk"), (0, "low disk"), (1, "odd number")):
        job(tmp_path, rank).warn(text)
    assert capfd.readouterr().err == "[rank 2] warning: low disk\n[rank 1] warning: odd number\n"


def test_folders_of_ended_launches_are_removed(tmp_path: Path) -> None:
    own = job(tmp_path, 1).folder
    old = tmp_path / f"hybrid5d-{os.getuid()}-999999999-1"
    alive = tmp_path / f"hybrid5d-{os.getuid()}-{os.getpid()}-{_started(os.getpid())}"
    other = tmp_path / "hybrid5d-notes"
    for folder in (old, alive, other):
        folder.mkdir()
    _sweep(own)
    assert sorted(p for p in tmp_path.iterdir()) == sorted([own, alive, other])
