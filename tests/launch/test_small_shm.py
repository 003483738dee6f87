"""P16 of a list of failures seen elsewhere: a container's small /dev/shm, and a start right after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.test_runs import trains, wait
from tests.launch_kit import REPO, TP2, metrics, write_run

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
SMALL = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size="$0" tmpfs /dev/shm && exec "$@"']


def _train(folder: Path, *words: str, shm: str | None = None) -> subprocess.CompletedProcess[str]:
    small = [*SMALL, shm] if shm else []
    command = [*small, sys.executable, "-m", "hybrid5d", "train", str(write_run(folder)), "--num-procs", "2", TP2]
    return subprocess.run([*command, *words], capture_output=True, text=True, cwd=REPO, timeout=300)


@pytest.mark.skipif(
    subprocess.run([*SMALL, "1m", "true"], capture_output=True).returncode != 0,
    reason="this machine does not let us mount a small /dev/shm",
)
def test_a_small_shm_is_said_and_gloo_carries_the_same_numbers(tmp_path: Path) -> None:
    plain = _train(tmp_path / "a")
    small = _train(tmp_path / "b", shm="256k")
    assert plain.returncode == 0 and small.returncode == 0, small.stderr
    assert "collectives: shared memory" in plain.stdout
    lines = [
        line for line in small.stdout.splitlines() + small.stderr.splitlines() if "room" in line or "/dev/shm" in line
    ]
    assert len(lines) == 1 and "gloo" in lines[0], (small.stdout, small.stderr)
    numbers = [[(s["loss"], s["grad_norm"]) for s in metrics(tmp_path / n / "run")] for n in "ab"]
    assert len(numbers[0]) == len(numbers[1]) > 0
    for a, b in zip(*numbers):
        assert a == pytest.approx(b, abs=1e-6)


def test_a_killed_run_leaves_nothing_and_the_next_works_at_once(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    path = write_run(tmp_path / "a")
    command = [
        sys.executable,
        "-m",
        "hybrid5d",
        "train",
        str(path),
        "--num-procs",
        "2",
        TP2,
        "runner.max_steps=100000",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=REPO, start_new_session=True
    )
    try:
        wait(lambda: trains(tmp_path / "a" / "run"))
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # in whatever the ranks are doing
        process.wait()
    again = _train(tmp_path / "b")
    assert again.returncode == 0, again.stderr
    assert "collectives: shared memory" in again.stdout
    wait(lambda: set(os.listdir("/dev/shm")) <= before, 60)
