"""The README's claims and commands, and every YAML that is shipped."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybrid5d.load import load_config
from hybrid5d.plan.run import build_plan
from tests.cli_kit import hybrid5d
from tests.harness import run_ranks

REPO = Path(__file__).resolve().parents[2]
README = (REPO / "README.md").read_text(encoding="utf-8")
PAGES = [*REPO.glob("*.md"), *sorted((REPO / "docs").rglob("*.md"))]
YAMLS = sorted(p.relative_to(REPO) for p in (REPO / "examples").rglob("*.yaml"))
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
STARTS = ("deepspeed", "accelerate", "torchrun", "python")
LAUNCH_LINES = [line for _, block in BLOCKS for line in block.splitlines() if line.startswith(STARTS)]


@pytest.mark.parametrize("path", YAMLS, ids=str)
def test_every_shipped_yaml_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    load_config(path)  # raises where it has a key or a value that is not understood


def test_the_quickstart_is_planned_for_eight_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    plan = build_plan(load_config("examples/quickstart.yaml"), 8)
    layout = plan.layout
    assert (layout.tp, layout.pp, layout.cp, layout.dp, plan.sequence_parallel) == (2, 2, 2, 1, True)
    assert plan.model is not None and plan.model.vocab_size == 259


SMALL = [
    "runner.max_steps=1", "runner.save_interval=-1", "runner.seq_length=64", "actor.global_batch_size=2",
    f"data.train_data_paths=[{REPO}/hybrid5d/parallel/*.py]",
    f"data.val_data_paths=[{REPO / 'hybrid5d' / 'errors.py'}]",
]  # fmt: skip


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("line", LAUNCH_LINES)
def test_launch_lines_train(line: str, tmp_path: Path) -> None:
    words = [*shlex.split(line), *SMALL, f"runner.output_dir={tmp_path}", f"data.cache_dir={tmp_path / 'cache'}"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=REPO, timeout=380, env={**os.environ, "PATH": path}
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "quickstart" / "result.json").is_file()


def test_the_readme_has_a_line_for_each_launcher() -> None:
    assert [shlex.split(line)[0] for line in LAUNCH_LINES] == ["deepspeed", "accelerate", "torchrun", "python"]


def test_the_refusal_in_the_readme_is_the_real_one() -> None:
    (block,) = [b for _, b in BLOCKS if b.startswith("$ hybrid5d train")]
    command, *wanted = block.strip().splitlines()
    done = hybrid5d(*shlex.split(command)[2:])
    assert done.returncode == 2
    assert done.stderr.split() == " ".join(wanted).split()


def _python_block(rank: int, block: str, words: list[str]) -> list[list[Any]]:
    """Run the README's example in this process, with a small run; what it prints."""
    import hybrid5d as package

    os.chdir(REPO)
    load, printed = package.load_config, []
    package.load_config = lambda path, given: load(path, [*given, *words])
    exec(compile(block, "README.md", "exec"), {"print": lambda *values: printed.append(list(values))})
    return printed


def test_the_python_example_trains(tmp_path: Path) -> None:
    (block,) = [b for language, b in BLOCKS if language == "python" and "train_batch" in b]
    degrees = [f"actor.model.{axis}_model_parallel_size={n}" for axis, n in (("tensor", 2), ("pipeline", 1))]
    words = [*SMALL, *degrees, "actor.model.context_parallel_size=1", f"data.cache_dir={tmp_path}"]
    one, two = run_ranks(2, _python_block, block, [*words, "runner.max_steps=2"])
    assert one == two and [step for step, _, _ in one] == [1, 2]
    assert all(loss > 0 and norm > 0 for _, loss, norm in one)


def test_what_the_package_exports_is_there_without_torch() -> None:
    code = (
        "import sys, hybrid5d; hybrid5d.Document, hybrid5d.StepBatch, hybrid5d.StepResult, dir(hybrid5d); "
        "assert 'torch' not in sys.modules; from hybrid5d import Engine, initialize; assert 'torch' in sys.modules; "
        "assert {n for n in hybrid5d.__all__ if not hasattr(hybrid5d, n)} == set()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO, timeout=120)
    assert done.returncode == 0, done.stderr


def test_code_cites_headings_of_the_deepspeed_page() -> None:
    """Each comment `(deepspeed.md: HEADING)` names a heading, and each heading is cited or names a file of ours."""
    headings = dict(re.findall(r"^### (.+)\n\n((?:.+\n)+)", (REPO / "docs/deepspeed.md").read_text(), re.MULTILINE))
    sources = "\n".join(p.read_text() for p in (REPO / "hybrid5d").rglob("*.py"))
    cited = {" ".join(c.split()) for c in re.findall(r"\(deepspeed\.md: ([^)]+)\)", sources)}
    assert cited and cited <= set(headings), cited - set(headings)
    for heading in set(headings) - cited:
        names = re.findall(r"`((?:plan|train|engine)/\w+\.py)`|\[checkpoints", headings[heading])
        assert names or "stage 1" in headings[heading], heading


@pytest.mark.parametrize("verb", ["train", "eval", "convert", "export", "plan", "check", "config", "env", "report"])
def test_every_verb_explains_itself(verb: str) -> None:
    done = hybrid5d(verb, "--help")
    assert done.returncode == 0 and f"hybrid5d {verb}" in done.stdout
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
    check = [sys.executable, "-m", "tests.docs.matrix", "--check"]  # it collects the suite: a pytest of its own
    done = subprocess.run(check, capture_output=True, text=True, cwd=REPO, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
