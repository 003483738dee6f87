"""Ranks of one node that watch each other, without a process group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybrid5d.errors import ConfigError, ConfigErrors
from hybrid5d.launch.env import LaunchEnv
from hybrid5d.launch.progress import started_at
from hybrid5d.launch.watch import REPEAT_SECONDS, Job, _sweep
from hybrid5d.train.requests import Request


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
        (r.folder / f"{r.env.rank}.pid").write_text(f"{pid} {started_at(pid)}")
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


class Left(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A rank that trains, and was sent SIGTERM just now."""

    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(os, "_exit", leave)
    found = job(tmp_path, 1)
    found.requests.answered = True
    found._signalled(signal.SIGTERM)
    assert found.requests.asked is Request.STOP
    return found


def test_sigterms_of_one_moment_are_one_and_a_later_one_ends_at_once(
    asked: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler signals every process, and launchers pass it on to ranks that have it already."""
    asked._signalled(signal.SIGTERM)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + REPEAT_SECONDS + 0.1)
    with pytest.raises(Left, match="143"):
        asked._signalled(signal.SIGTERM)


def test_a_launcher_that_the_signal_ended_cuts_no_save_short(asked: Job) -> None:
    asked._orphaned()
    assert asked.requests.asked is Request.STOP


def test_a_lost_launcher_asks_for_a_save(tmp_path: Path) -> None:
    found = job(tmp_path, 1)
    found.requests.answered = True
    found._orphaned()
    assert found.requests.asked is Request.LEAVE


@pytest.mark.parametrize("answered, code, told", [(True, 1, "runner.grace_seconds"), (False, 3, "nothing to save yet")])
def test_the_grace_ends(answered: bool, code: int, told: str) -> None:
    """A save that takes too long ends the rank; before anybody answers, SIGTERM ends it at once."""
    script = (
        "import os, signal, time\nfrom hybrid5d.launch.env import LaunchEnv\nfrom hybrid5d.launch.watch import Job\n"
        f"job = Job(LaunchEnv())\njob.grace_seconds = 0.2\njob.requests.answered = {answered}\n"
        "job.join()\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert done.returncode == code and told in done.stderr


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
    alive = tmp_path / f"hybrid5d-{os.getuid()}-{os.getpid()}-{started_at(os.getpid())}"
    other = tmp_path / "hybrid5d-notes"
    for folder in (old, alive, other):
        folder.mkdir()
    _sweep(own)
    assert sorted(p for p in tmp_path.iterdir()) == sorted([own, alive, other])
