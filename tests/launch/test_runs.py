"""One folder, one run: a second start, changed settings, signals, the same command again; all with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hybrid5d.errors import ConfigErrors
from hybrid5d.launch.env import LaunchEnv
from hybrid5d.launch.worker import _plan
from hybrid5d.load import load_config
from hybrid5d.plan.outputs import write_settings
from tests.cli_kit import hybrid5d
from tests.launch_kit import REPO, TP2, launcher, metrics, run, write_run

pytestmark = pytest.mark.timeout(900)
FULL = pytest.mark.full
TRAIN = [sys.executable, "-m", "hybrid5d", "train"]


def wait(condition: Callable[[], bool], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.1)


def trains(folder: Path) -> bool:
    lines = folder / "metrics.jsonl"
    return lines.exists() and lines.stat().st_size > 0


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of one process that goes on until it is stopped, in tmp_path/a/run."""
    path = write_run(tmp_path / "a")
    words = [*TRAIN, str(path), "runner.max_steps=1000000", "actor.optim.lr=1e-3"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=REPO)
    try:
        wait(lambda: trains(tmp_path / "a" / "run"))
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_second_start_is_refused_and_a_signal_is_named(tmp_path: Path, endless: subprocess.Popen[str]) -> None:
    path, folder = tmp_path / "a" / "run.yaml", tmp_path / "a" / "run"
    before = (folder / "resolved.yaml").read_text()
    second = hybrid5d("train", path, "actor.optim.lr=3e-3")
    assert second.returncode == 2 and f"{folder}': is in use by another run: pid " in second.stderr
    other = run([sys.executable, "-m", "hybrid5d.worker", "--config", str(path), "actor.optim.lr=3e-3"])
    assert other.code == 2 and "is in use by another run: pid " in other.err and len(other.err.splitlines()) == 1
    assert (folder / "resolved.yaml").read_text() == before and {m["lr"] for m in metrics(folder)} <= {0, 5e-4, 1e-3}
    endless.send_signal(signal.SIGINT)
    _, text = endless.communicate(timeout=60)
    assert endless.returncode == 130 and text.startswith("SIGINT: ending the run\n") and "out of memory" not in text


def test_a_folder_is_free_again_after_a_kill_and_the_old_run_is_kept(
    tmp_path: Path, endless: subprocess.Popen[str]
) -> None:
    path, folder = tmp_path / "a" / "run.yaml", tmp_path / "a" / "run"
    endless.kill()
    endless.wait()
    wait(lambda: hybrid5d("train", path, "actor.optim.clip_grad=-1").returncode == 2)
    ended = run([*TRAIN, str(path), "runner.max_steps=1"], 400)
    deadline = time.monotonic() + 60
    while ended.code == 2 and time.monotonic() < deadline:  # the worker notices within seconds that it is alone
        ended = run([*TRAIN, str(path), "runner.max_steps=1"], 400)
    assert ended.code == 0, ended.err
    assert "is kept in earlier-1/" in ended.out and trains(folder / "earlier-1") and len(metrics(folder)) == 1


@FULL
def test_the_same_command_again_keeps_the_result(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a")
    words = [*TRAIN, str(path), "runner.save_interval=2", "runner.resume_dir=auto"]
    result = tmp_path / "a" / "run" / "result.json"
    assert run(words).code == 0
    first = json.loads(result.read_text())
    ended = run(words)
    assert ended.code == 0 and "nothing to do" in ended.out
    assert json.loads(result.read_text()) == first and first["loss"] and Path(first["hf"]).is_dir()
    newest = result.parent / "checkpoints" / "global_step_4" / "actor"
    next(newest.glob("optim-*")).unlink()
    ended = run([*words, "runner.max_steps=5"])
    assert ended.code == 0, ended.err
    assert "the checkpoint of step 4 is passed over" in ended.out and "at step 2" in ended.out
    assert "checkpoints after step 2 are kept in earlier-1/" in ended.out
    assert [m["step"] for m in metrics(result.parent)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=FULL)])
def test_a_signal_to_one_rank_is_the_jobs(tmp_path: Path, number: signal.Signals) -> None:
    path = write_run(tmp_path / "a")
    words = [*launcher("torchrun", 2), "--config", str(path), TP2, "runner.max_steps=1000000"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=REPO)
    try:
        wait(lambda: trains(tmp_path / "a" / "run"))
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ranks = [pid for pid in children if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
        os.kill(int(ranks[0]), number)
        _, text = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode != 0
    result = tmp_path / "a" / "run" / "result.json"
    if number == signal.SIGTERM:
        assert "[rank" not in text and json.loads(result.read_text())["exit_code"] == 3
        assert Path(json.loads(result.read_text())["checkpoint"]).is_dir()
        return
    assert not result.exists()
    told = [line for line in text.splitlines() if line.startswith("[rank ")]
    assert len(told) == 1 and told[0].startswith("[rank 1] step ") and told[0].endswith(f"stopped by {number.name}")


def test_an_unknown_option_is_printed_once_for_all_ranks() -> None:
    words = [sys.executable, "-m", "hybrid5d.worker", "--config", "x.yaml", "--lr=1"]
    environ = {**os.environ, "WORLD_SIZE": "3"}
    ranks = [
        subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=REPO, env={**environ, "RANK": str(r)})
        for r in range(3)
    ]
    texts = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2] * 3
    assert texts[0].startswith("unknown option --lr=1") and texts[1:] == ["", ""]


def test_ranks_refuse_settings_that_another_start_replaced(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a")
    digest = write_settings(tmp_path / "run", load_config(path))
    args = Namespace(run_dir=tmp_path / "run", digest=digest, eval=False, overrides=[])
    plan, notices = _plan(args, LaunchEnv())
    assert plan.config.actor.optim.lr == 1e-2 and notices == ()
    write_settings(tmp_path / "run", load_config(path, ["actor.optim.lr=3e-3"]))
    with pytest.raises(ConfigErrors, match="changed after the launcher wrote it"):
        _plan(args, LaunchEnv())


@pytest.mark.parametrize(
    "patterns, text", [("model.layer.0.*", "matches none of the model's"), ("*", "nothing is left")]
)
def test_freezing_nothing_or_everything_is_refused_before_the_start(tmp_path: Path, patterns: str, text: str) -> None:
    path = write_run(tmp_path / "a")
    done = hybrid5d("train", path, f"actor.freeze_parameters=['{patterns}']")
    assert done.returncode == 2 and text in done.stderr and not (tmp_path / "a" / "run").exists()
