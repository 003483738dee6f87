"""Which checkpoint is meant: pointer, newest complete one, leftovers; manifests that lie."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid5d.checkpoint.manifest import (
    Manifest,
    Resume,
    Run,
    StoredFile,
    StoredTensor,
    checkpoints,
    describe_layout,
    faults_of,
    file_faults,
    find_checkpoint,
    read_manifest,
    resolve_resume,
    uncovered,
)
from hybrid5d.errors import CheckpointError
from hybrid5d.files import crc32_of

DROP = object()


def manifest(**changes: object) -> Manifest:
    tensor = StoredTensor(
        (4, 3), True, {"weight": (Run("a", 0, 0, 2), Run("a", 0, 2, 4)), "exp_avg": (Run("a", None, 0, 4),)}
    )
    layout = {"pp": 1, "dp": 1, "cp": 1, "tp": 2, "zero_stage": 1, "optimizer": "AdamW"}
    optimizer = {"type": "AdamW", "state": ["exp_avg"], "step": 3}
    known = {"a": StoredFile(5, 7)}
    values = {
        "step": 3,
        "layout": layout,
        "precision": "fp32",
        "optimizer": optimizer,
        "tensors": {"w": tensor},
        "files": known,
    }
    return Manifest(**{**values, **changes})  # type: ignore[arg-type]


def put(root: Path, name: str) -> Path:
    """A whole checkpoint."""
    actor = root / name / "actor"
    actor.mkdir(parents=True)
    (actor / "a").write_bytes(b"12345")
    (actor / "manifest.json").write_text(manifest(step=int(name.split("_")[2].split(".")[0])).to_json())
    return actor


def test_manifest_survives_the_disk(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(manifest(state={"epoch": 1}).to_json())
    got = read_manifest(tmp_path)
    assert got.tensors == manifest().tensors and got.files == manifest().files and got.state == {"epoch": 1}
    assert got.kinds == ("weight", "exp_avg") and describe_layout(got.layout) == "pp1 dp1 cp1 tp2, zero 1, AdamW"


def test_manifests_of_another_format(tmp_path: Path) -> None:
    text = manifest().to_json()
    (tmp_path / "manifest.json").write_text(text.replace('"format": 1', '"format": 2'))
    with pytest.raises(CheckpointError, match="format 2 is not 1"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1}', '{"format": 2}', "null"])
def test_damaged_manifests(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        read_manifest(tmp_path)
    assert "manifest.json" in str(caught.value) and "\n" not in str(caught.value)


def test_runs_must_cover_the_tensor() -> None:
    assert uncovered(manifest()) == []
    short = StoredTensor((4, 3), True, {"weight": (Run("a", 0, 0, 2),), "exp_avg": (Run("b", 1, 0, 2),)})
    assert uncovered(manifest(tensors={"w": short})) == [
        "weight of w: 6 of 12 elements",
        "exp_avg of w: 8 of 12 elements",
    ]


def test_no_element_may_be_stored_twice() -> None:
    twice = {"weight": (Run("a", 0, 0, 2), Run("a", 0, 1, 3)), "exp_avg": (Run("a", 0, 0, 2), Run("a", 1, 1, 3))}
    (first,) = uncovered(manifest(tensors={"w": StoredTensor((4, 3), True, {"weight": twice["weight"]})}))
    assert first == "weight of w: some elements twice"
    across = StoredTensor((4, 2), True, {"exp_avg": (Run("a", 0, 0, 2), Run("a", 1, 1, 2))})
    assert uncovered(manifest(tensors={"w": across})) == ["exp_avg of w: some elements twice"]


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "b/a", "..", "", "a\0", ".a", "a b"])
def test_no_name_leaves_the_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "manifest.json").write_text(manifest(files={"a": StoredFile(5, 7), name: StoredFile(5, 7)}).to_json())
    with pytest.raises(CheckpointError, match="no name of a file here"):
        read_manifest(tmp_path)


def _nodes(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield (*path, key)
        yield from _nodes(value, (*path, key))


def test_mutated_manifests_are_refused_or_valid_and_never_a_traceback(tmp_path: Path) -> None:
    """Every value of a manifest in turn: gone, or of another kind or size."""
    actor = put(tmp_path, "global_step_3")
    whole = json.loads((actor / "manifest.json").read_text())
    tried = refused = 0
    for path in _nodes(whole):
        for value in (DROP, None, -1, 2**70, "../x", [], {}, True, 1.5):
            tree = json.loads(json.dumps(whole))
            node = tree
            for key in path[:-1]:
                node = node[key]
            if value is DROP:
                del node[path[-1]]
            else:
                node[path[-1]] = value
            (actor / "manifest.json").write_text(json.dumps(tree))
            faults = faults_of(actor)
            assert all("\n" not in fault for fault in faults), faults
            tried, refused = tried + 1, refused + bool(faults)
    assert tried > 400 and refused > 0.7 * tried, (tried, refused)


def test_file_faults(tmp_path: Path) -> None:
    assert "No such file" in file_faults(tmp_path, manifest())[0]
    (tmp_path / "a").write_bytes(b"1234")
    assert "has 4 bytes, not the 5" in file_faults(tmp_path, manifest())[0]
    (tmp_path / "a").write_bytes(b"12345")
    assert file_faults(tmp_path, manifest()) == []
    assert crc32_of(tmp_path / "a") == 0xCBF53A1C


def test_steps_are_ordered_as_numbers_and_leftovers_are_no_checkpoints(tmp_path: Path) -> None:
    for name in ("global_step_2", "global_step_10", "global_step_9.old", "global_step_9", "global_step_11.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "global_step_12").write_text("a file")
    names = ["global_step_10", "global_step_9", "global_step_9.old", "global_step_2"]
    assert [p.name for _, p in checkpoints(tmp_path)] == names and checkpoints(tmp_path / "none") == []


@pytest.mark.parametrize("latest", ["global_step_2\n", "global_step_7\n", "", None])
def test_auto_takes_the_newest_whole_one_whatever_latest_says(tmp_path: Path, latest: str | None) -> None:
    for step in (2, 10, 9):
        put(tmp_path, f"global_step_{step}")
    if latest is not None:
        (tmp_path / "latest").write_text(latest)
    found = resolve_resume("auto", tmp_path)
    assert (found.source, found.passed_over, found.step) == (tmp_path / "global_step_10" / "actor", (), 10)


def lose_a_file(actor: Path) -> None:
    (actor / "a").unlink()


def truncate(actor: Path) -> None:
    (actor / "a").write_bytes(b"123")


def lose_the_manifest(actor: Path) -> None:
    (actor / "manifest.json").unlink()


def damage_the_manifest(actor: Path) -> None:
    (actor / "manifest.json").write_text("{")


def leave_a_gap(actor: Path) -> None:
    short = StoredTensor((4, 3), True, {"weight": (Run("a", 0, 0, 2),)})
    (actor / "manifest.json").write_text(manifest(tensors={"w": short}).to_json())


FAULTS = {
    lose_a_file: "No such file", truncate: "has 3 bytes, not the 5", lose_the_manifest: "manifest.json is missing",
    damage_the_manifest: "is damaged", leave_a_gap: "weight of w: 6 of 12 elements",
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_checkpoint_that_is_not_whole(tmp_path: Path, fault: Callable[[Path], None]) -> None:
    """`auto` passes it over and says why; alone, or named, it is refused: nothing starts over where checkpoints are."""
    root = tmp_path / "checkpoints"
    newest = put(root, "global_step_9")
    (root / "latest").write_text("global_step_9\n")
    fault(newest)
    with pytest.raises(CheckpointError, match="none is whole") as alone:
        resolve_resume("auto", root)
    assert FAULTS[fault] in str(alone.value) and "step 9" in str(alone.value)
    older = put(root, "global_step_4")
    found = resolve_resume("auto", root)
    assert found.source == older and len(found.passed_over) == 1
    assert "step 9" in found.passed_over[0] and FAULTS[fault] in found.passed_over[0]
    for path in (newest.parent, root, *([newest] if fault is not lose_the_manifest else [])):
        with pytest.raises(CheckpointError) as named:
            resolve_resume(str(path), root)
        assert FAULTS[fault] in str(named.value)


def test_what_proved_damaged_when_it_was_read_is_passed_over(tmp_path: Path) -> None:
    old, new = put(tmp_path, "global_step_4"), put(tmp_path, "global_step_9")
    found = resolve_resume("auto", tmp_path, [new])
    assert found.source == old and "content is damaged" in found.passed_over[0]
    with pytest.raises(CheckpointError, match="none is whole"):
        resolve_resume("auto", tmp_path, [new, old])


def test_a_crash_between_the_two_renames_of_a_save_over_a_step(tmp_path: Path) -> None:
    old = put(tmp_path, "global_step_7.old")
    assert resolve_resume("auto", tmp_path).source == old
    assert find_checkpoint(tmp_path / "global_step_7") == old


def test_resume_dir(tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    assert resolve_resume(None, root) == resolve_resume("auto", root) == Resume()
    actor = put(root, "global_step_5")
    assert resolve_resume(None, root).source is None and resolve_resume("auto", root).source == actor
    for path in (root, root / "global_step_5", actor):
        assert resolve_resume(str(path), Path("/nowhere")).source == actor
    for path, words in ((tmp_path / "none", "does not exist"), (tmp_path, "holds no complete checkpoint")):
        with pytest.raises(CheckpointError, match=words):
            resolve_resume(str(path), root)


def test_reading_needs_no_torch() -> None:
    code = "import sys, hybrid5d.checkpoint.manifest; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": "."})


def test_manifest_is_readable_json() -> None:
    raw = json.loads(manifest().to_json())
    assert raw["format"] == 1 and raw["tensors"]["w"]["runs"]["weight"][1] == {
        "file": "a",
        "dim": 0,
        "start": 2,
        "stop": 4,
    }
