"""Which checkpoints `keep_last` removes: whole ones of the run's own line, nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hybrid5d.checkpoint.manifest import resolve_resume
from hybrid5d.checkpoint.retention import PIN, line_of, prune
from hybrid5d.load import load_config
from hybrid5d.plan.run import build_plan
from tests.checkpoint.test_manifest import manifest
from tests.config_kit import error_lines, native, write_yaml


def put(root: Path, step: int, follows: str, own: str = "") -> Path:
    """A whole checkpoint of id `own` (default: its step)."""
    actor = root / f"global_step_{step}" / "actor"
    actor.mkdir(parents=True)
    (actor / "a").write_bytes(b"12345")
    (actor / "manifest.json").write_text(manifest(step=step, id=own or str(step), follows=follows).to_json())
    return actor.parent


def steps(root: Path) -> list[int]:
    return sorted(int(p.name.rpartition("_")[2]) for p in root.iterdir() if p.is_dir())


def test_the_newest_stay_and_multiples(tmp_path: Path) -> None:
    before = ""
    for step in (2, 4, 6, 8, 1000):
        newest = put(tmp_path, step, before)
        before = str(step)
    assert [step for step, _ in line_of(newest)] == [1000, 8, 6, 4, 2]
    assert {p.name for p in prune(newest, 2, 4)} == {"global_step_6", "global_step_2"}
    assert steps(tmp_path) == [4, 8, 1000] and prune(newest, 2, 4) == []


def test_what_is_not_of_this_line_stays(tmp_path: Path) -> None:
    """Steps 2..10 were saved, then the run went back to 4 and saved 6: 8 and 10 are another line's, and newer."""
    put(tmp_path, 2, "")
    put(tmp_path, 4, "2")
    put(tmp_path, 8, "old 6")
    put(tmp_path, 10, "8")
    put(tmp_path, 3, "", "a copy of another run")
    newest = put(tmp_path, 6, "4")
    (tmp_path / "global_step_5").symlink_to(tmp_path / "global_step_4")
    (tmp_path / "global_step_1").mkdir()
    (tmp_path / "notes").mkdir()
    assert [p.name for p in prune(newest, 1)] == ["global_step_4", "global_step_2"]
    (tmp_path / "global_step_5").unlink()
    shutil.rmtree(tmp_path / "notes")
    assert steps(tmp_path) == [1, 3, 6, 8, 10]


def test_pinned_and_damaged_ones_stay_and_do_not_count(tmp_path: Path) -> None:
    put(tmp_path, 2, "")
    (put(tmp_path, 4, "2") / PIN).touch()
    (put(tmp_path, 6, "4") / "actor" / "a").write_bytes(b"1")
    newest = put(tmp_path, 8, "6")
    assert prune(newest, 3) == []  # 8, 4 and 2 are whole: three
    assert [p.name for p in prune(newest, 1)] == ["global_step_2"]


def test_nothing_goes_while_the_newest_is_not_whole(tmp_path: Path) -> None:
    put(tmp_path, 2, "")
    put(tmp_path, 4, "2")
    newest = put(tmp_path, 6, "4")
    (newest / "actor" / "a").unlink()
    assert prune(newest, 1) == [] and steps(tmp_path) == [2, 4, 6]


def test_a_damaged_critic_makes_a_checkpoint_no_whole_one(tmp_path: Path) -> None:
    """What `auto` passes over is not counted among those that stay, and nothing goes while the newest is such."""
    before = ""
    for step in (2, 4, 6, 8):
        folder = put(tmp_path, step, before)
        shutil.copytree(folder / "actor", folder / "critic")
        before = str(step)
    (tmp_path / "global_step_6" / "critic" / "a").unlink()
    assert resolve_resume("auto", tmp_path).source == tmp_path / "global_step_8" / "actor"
    assert prune(tmp_path / "global_step_6", 1) == []
    assert [p.name for p in prune(tmp_path / "global_step_8", 2)] == ["global_step_2"]
    assert steps(tmp_path) == [4, 6, 8]


def test_keep_every_without_keep_last_is_refused(tmp_path: Path) -> None:
    path = write_yaml(tmp_path / "run.yaml", native(runner__keep_every=4))
    lines = error_lines(lambda: build_plan(load_config(path), 4))
    assert "runner.keep_last is null" in lines["runner.keep_every"]


@pytest.mark.parametrize("key", ["keep_last", "keep_every"])
def test_counts_are_one_or_more(tmp_path: Path, key: str) -> None:
    path = write_yaml(tmp_path / "run.yaml", native(**{f"runner__{key}": 0}))
    assert f"runner.{key}" in error_lines(load_config, path)
