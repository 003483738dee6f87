"""`make rl`: its data, and that it learns."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch_kit import free_port

REPO = Path(__file__).resolve().parents[2]
SCRIPT = "examples/larger_number.py"


def commands(seed: int) -> list[list[str]]:
    """The recipe of the Makefile's target, word by word."""
    text = (REPO / "Makefile").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"^rl:.*\n((?:\t.*\n)+)", text, re.MULTILINE)
    values = {
        "SEEDS": f"data.seed={seed} actor.seed={seed}",
        "SEED": str(seed),
        "BIN": str(Path(sys.executable).parent),
    }
    for name, value in values.items():
        recipe = recipe.replace(f"$({name})", value)
    lines = [shlex.split(line) for line in recipe.splitlines()]
    return [[*w[:1], "--master_port", str(free_port()), *w[1:]] if Path(w[0]).name == "deepspeed" else w for w in lines]


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_no_validation_prompt_is_trained_on(tmp_path: Path) -> None:
    subprocess.run([sys.executable, SCRIPT, "--seed", "3", str(tmp_path)], cwd=REPO, check=True)
    prompts, validation = rows(tmp_path / "prompts.jsonl"), rows(tmp_path / "validation.jsonl")
    shown = [bytes(row["input_ids"][1:-1]).decode() for row in rows(tmp_path / "demonstrations.jsonl")]  # type: ignore[arg-type]
    for row in (*prompts, *validation):
        numbers = [int(x) for x in row["prompt"][:-1].split("?")]
        assert int(row["answer"]) == max(numbers) and numbers[0] != numbers[1]
    held_out = {row["prompt"] for row in validation}
    assert len(held_out) == 128 and held_out.isdisjoint(row["prompt"] for row in prompts)
    assert held_out.isdisjoint(text[:6] for text in shown)
    right = sum(text[6:] == str(max(int(text[:2]), int(text[3:5]))) for text in shown)
    assert 0.4 < right / len(shown) < 0.6  # the demonstrations do not teach the comparison


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_example_learns(tmp_path: Path) -> None:
    """A seed that README does not name: greedy answers to prompts never trained on are right more often."""
    (tmp_path / "examples").symlink_to(REPO / "examples")
    for words in commands(seed=7):
        done = subprocess.run(
            words, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "DS_ACCELERATOR": "cpu"}
        )
        assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(x)["reward"] for x in (tmp_path / "results/rl/eval.jsonl").read_text().splitlines()]
    assert len(found) == 5 and found[-1] >= found[0] + 0.2, found
