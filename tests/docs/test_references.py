"""What the pages name exists: verbs and their options, files, keys of the schema."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

import pytest

from hybrid5d.config.schema import schema_keys
from tests.cli_kit import hybrid5d

REPO = Path(__file__).resolve().parents[2]
GENERATED = ("errors.md", "python.md")  # compared with the sources as a whole
PAGES = [p for p in (*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md")) if p.name not in GENERATED]
ROOTS = "benchmarks|docs|ds_configs|examples|hybrid5d|tests"
INSIDE = "|".join(p.name for p in (REPO / "hybrid5d").iterdir() if p.is_dir())


def code(text: str) -> list[str]:
    """Lines of code blocks and inline code."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    rest = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return [
        *(line for b in blocks for line in b.splitlines()),
        *(" ".join(w.split()) for w in re.findall(r"`([^`]+)`", rest)),
    ]


@lru_cache
def help_of(verb: str) -> str:
    done = hybrid5d(*verb.split(), "--help")
    assert done.returncode == 0, verb
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(REPO)))
def test_verbs_and_options_exist(page: Path) -> None:
    for line in code(page.read_text(encoding="utf-8")):
        for verb, rest in re.findall(r"(?:^|[\s/])hybrid5d ([a-z]+)\b([^;&]*)", line.removeprefix("$ ")):
            if ":" in line.partition("hybrid5d")[0] or verb == "on":  # a line of output
                continue
            shown = help_of(verb)
            for option in re.findall(r"(?<!\S)\[?(--[a-z-]+)", rest):
                assert option in shown, f"{verb} {option}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(REPO)))
def test_files_and_keys_exist(page: Path) -> None:
    keys = schema_keys()
    for word in code(page.read_text(encoding="utf-8")):
        for path in re.findall(rf"(?<![\w./-])((?:{ROOTS})/[\w./-]+\.(?:py|yaml|md|json|jsonl|sbatch))\b", word):
            assert (REPO / path).exists(), path
        if re.fullmatch(rf"(?:{INSIDE})/\w+\.py", word):
            assert (REPO / "hybrid5d" / word).exists() or (REPO / "tests").joinpath(word).exists(), word
        name = word.partition("=")[0].partition(":")[0]
        if re.fullmatch(r"(actor|runner|data|algorithm|critic|cluster|reward)(\.[a-z_0-9]+)+", name):
            known = name in keys or any(k.startswith(f"{name}.") for k in keys) or name.startswith("actor.deepspeed.")
            assert known or name.startswith(("actor.megatron.", "cluster.component_placement.")), name
