"""The README's claims and commands, and every YAML that is shipped."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid5d.load import load_config
from hybrid5d.plan.run import build_plan

REPO = Path(__file__).resolve().parents[2]
README = (REPO / "README.md").read_text(encoding="utf-8")
PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").glob("*.md"))]
YAMLS = sorted(p.relative_to(REPO) for p in (REPO / "examples").rglob("*.yaml"))
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, cwd=REPO, timeout=120)


@pytest.mark.parametrize("path", YAMLS, ids=str)
def test_every_shipped_yaml_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    assert load_config(path).actor.model.tensor_model_parallel_size >= 1


def test_the_quickstart_is_planned_for_eight_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    plan = build_plan(load_config("examples/quickstart.yaml"), 8)
    layout = plan.layout
    assert (layout.tp, layout.pp, layout.cp, layout.dp, plan.sequence_parallel) == (2, 2, 2, 1, True)
    assert plan.model is not None and plan.model.vocab_size == 259


def test_launch_lines_name_files_and_options_that_exist() -> None:
    starts = ("deepspeed", "accelerate", "torchrun", "python")
    lines = [line for _, block in BLOCKS for line in block.splitlines() if line.startswith(starts)]
    assert len(lines) >= 4
    for line in lines:
        for word in shlex.split(line):
            if word.startswith("examples/"):
                assert (REPO / word).is_file(), word
    helped = run([sys.executable, "-m", "hybrid5d", "train", "--help"]).stdout
    assert "--num-procs" in helped and "--launcher" in helped


def test_the_refusal_in_the_readme_is_the_real_one() -> None:
    (block,) = [b for _, b in BLOCKS if b.startswith("$ hybrid5d train")]
    command, *wanted = block.strip().splitlines()
    done = run([sys.executable, "-m", *shlex.split(command)[1:]])
    assert done.returncode == 2
    assert done.stderr.split() == " ".join(wanted).split()


def test_the_python_example_uses_what_exists() -> None:
    import hybrid5d
    from hybrid5d.data.build import loader_from_plan

    (block,) = [b for language, b in BLOCKS if language == "python"]
    compile(block, "README.md", "exec")
    for name in re.findall(r"hybrid5d\.(\w+)\(", block):
        assert callable(getattr(hybrid5d, name))
    assert loader_from_plan.__name__ in block


@pytest.mark.parametrize("verb", ["train", "eval", "convert", "export"])
def test_every_verb_explains_itself(verb: str) -> None:
    done = run([sys.executable, "-m", "hybrid5d", verb, "--help"])
    assert done.returncode == 0 and "Usage" in done.stdout
    assert f"hybrid5d {verb}" in README


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_make_targets_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), link
    targets = set(re.findall(r"^([a-z0-9-]+):", (REPO / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for target in re.findall(r"`make ([a-z0-9-]+)`", text):
        assert target in targets, target


def test_the_support_matrix_is_current() -> None:
    done = run([sys.executable, "-m", "tests.docs.matrix", "--check"])
    assert done.returncode == 0, done.stdout + done.stderr
