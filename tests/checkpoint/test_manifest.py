"""Which checkpoint is meant: pointer, newest complete one, leftovers; manifests that lie."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid5d.checkpoint.manifest import (
    Manifest,
    Run,
    StoredFile,
    StoredTensor,
    checkpoint_root,
    crc32_of,
    describe_layout,
    file_faults,
    find_checkpoint,
    newest_checkpoint,
    read_manifest,
    resolve_resume,
    uncovered,
)
from hybrid5d.errors import CheckpointError


def manifest(**changes: object) -> Manifest:
    tensor = StoredTensor(
        (4, 3), True, {"weight": (Run("a", 0, 0, 2), Run("a", 0, 2, 4)), "exp_avg": (Run("b", None, 0, 4),)}
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
    actor = root / name / "actor"
    actor.mkdir(parents=True)
    (actor / "manifest.json").write_text(manifest().to_json())
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


def test_file_faults(tmp_path: Path) -> None:
    assert "No such file" in file_faults(tmp_path, manifest())[0]
    (tmp_path / "a").write_bytes(b"1234")
    assert "has 4 bytes, not the 5" in file_faults(tmp_path, manifest())[0]
    (tmp_path / "a").write_bytes(b"12345")
    assert file_faults(tmp_path, manifest()) == []
    assert crc32_of(tmp_path / "a") == 0xCBF53A1C


def test_newest_is_what_latest_names(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        put(tmp_path, f"global_step_{step}")
    assert newest_checkpoint(tmp_path) == tmp_path / "global_step_10"
    (tmp_path / "latest").write_text("global_step_9\n")
    assert newest_checkpoint(tmp_path) == tmp_path / "global_step_9"
    assert find_checkpoint(tmp_path) == tmp_path / "global_step_9" / "actor"


def test_leftovers_and_lost_pointers(tmp_path: Path) -> None:
    put(tmp_path, "global_step_4")
    put(tmp_path, "global_step_8.tmp")
    (tmp_path / "global_step_6" / "actor").mkdir(parents=True)
    (tmp_path / "latest").write_text("global_step_6\n")  # incomplete: never renamed by us, perhaps deleted by hand
    assert newest_checkpoint(tmp_path) == tmp_path / "global_step_4"
    put(tmp_path, "global_step_7.old")  # a crash between the two renames of a save over step 7
    assert newest_checkpoint(tmp_path) == tmp_path / "global_step_7.old"
    assert find_checkpoint(tmp_path / "global_step_7") == tmp_path / "global_step_7.old" / "actor"


def test_resume_dir(tmp_path: Path) -> None:
    root = checkpoint_root(str(tmp_path), "run")
    assert root == tmp_path / "run" / "checkpoints"
    assert resolve_resume(None, root) is None and resolve_resume("auto", root) is None
    actor = put(root, "global_step_5")
    assert resolve_resume("auto", root) == actor
    for path in (root, root / "global_step_5", actor):
        assert resolve_resume(str(path), Path("/nowhere")) == actor
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
