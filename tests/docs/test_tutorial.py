"""The tutorial's commands: the cheap ones run here, all of them with marker `full`; the Chinese one has the same."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from hybrid5d.load import load_config
from hybrid5d.plan.run import build_plan
from tests.cli_kit import hybrid5d

REPO = Path(__file__).resolve().parents[2]
PAGE = (REPO / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS = [b.strip() for b in re.findall(r"^```\n(.*?)\n```$", PAGE, re.DOTALL | re.MULTILINE)]
STARTS = ("hybrid5d ", "deepspeed ")
COMMANDS = [b for b in BLOCKS if b.startswith(STARTS) and "\n" not in b]
SHOWN = dict(pairwise(BLOCKS))  # command -> what the page prints after it
CHEAP = [c for c in COMMANDS if re.match(r"hybrid5d (convert|plan)|.*(--dry-run|=3)$", c)]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder where the commands may write `results`."""
    for name in ("docs", "examples"):
        (tmp_path / name).symlink_to(REPO / name)
    return tmp_path


def test_every_verb_of_a_run_is_shown() -> None:
    assert len(COMMANDS) == 12 and len(CHEAP) == 5
    verbs = [shlex.split(c)[1] for c in COMMANDS if c.startswith("hybrid5d")]
    assert list(dict.fromkeys(verbs)) == ["convert", "plan", "check", "train", "export", "eval", "report"]


@pytest.mark.parametrize("command", CHEAP)
def test_cheap_commands_run_and_print_what_the_page_says(command: str, place: Path) -> None:
    done = hybrid5d(*shlex.split(command)[1:], cwd=place)
    assert done.returncode == (2 if command.endswith("=3") else 0), done.stderr
    shown = SHOWN[command] if not SHOWN[command].startswith(STARTS) else ""
    words = (done.stdout + done.stderr).split()
    assert " ".join(shown.split()) in " ".join(words)
    for name in re.findall(r"`(\w+\.(?:json|yaml))`", PAGE.partition("holds ")[2].partition("One key")[0]):
        assert "--out" not in command or (place / "results/tutorial-ds" / name).is_file(), name


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in CHEAP and ".yaml" in c])
def test_words_of_the_other_commands_make_a_plan(command: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    given = [w for w in shlex.split(command) if re.match(r"[a-z_.]+=", w) and not w.startswith("runner.resume_dir")]
    plan = build_plan(load_config("docs/tutorial.yaml", given), 4)
    assert plan.layout.world_size == 4
    assert plan.layout.cp == (2 if "context_parallel_size=2" in command else 1)


def _run(command: str, place: Path) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    words = shlex.split(command)
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=place, timeout=300, env={**os.environ, "PATH": path}
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _metrics(folder: Path) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines}


@pytest.mark.full
@pytest.mark.timeout(900)
def test_all_of_it(place: Path) -> None:
    """In order; the run that goes on in another layout has the numbers of the unbroken one."""
    for command in COMMANDS:
        if command not in CHEAP and not command.startswith("deepspeed"):
            _run(command, place)
    first, second = _metrics(place / "results/tutorial"), _metrics(place / "results/tutorial-cp")
    assert set(first) == set(range(1, 21)) and set(second) == set(range(11, 21))
    for step, line in second.items():
        assert line["loss"] == pytest.approx(first[step]["loss"], abs=1e-5)
        assert line["grad_norm"] == pytest.approx(first[step]["grad_norm"], rel=1e-5)
        assert line["lr"] == first[step]["lr"]
    assert {"config.json", "model.safetensors"} <= {p.name for p in (place / "results/tutorial-model").iterdir()}
    assert (place / "results/tutorial/report.html").is_file()
