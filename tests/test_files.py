"""Files and folders appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hybrid5d.files import replacing, write_whole


def test_a_file_is_the_old_one_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    write_whole(path, "old\n")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "new\n")
    assert path.read_text() == "old\n" and list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    write_whole(path, "n\u00e9w\r\n")
    assert path.read_bytes() == "n\u00e9w\r\n".encode()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("before", ["nothing", "folder", "leftovers"])
def test_a_folder_is_replaced_when_the_block_ends(tmp_path: Path, fails: bool, before: str) -> None:
    target = tmp_path / "x"
    for name in {"nothing": (), "folder": ("x",), "leftovers": ("x", "x.tmp", "x.old")}[before]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "old").write_text(name)

    def block() -> None:
        with replacing(target) as folder:
            assert list(folder.iterdir()) == [], "the leftovers of an interrupted write are gone"
            (folder / "new").write_text("")
            if fails:
                raise ValueError("in the block")

    if fails:
        with pytest.raises(ValueError, match="in the block"):
            block()
        assert [p.name for p in target.iterdir()] == ["old"] if before != "nothing" else not target.exists()
        assert not (tmp_path / "x.tmp").exists()
    else:
        block()
        assert [p.name for p in target.iterdir()] == ["new"] and list(tmp_path.iterdir()) == [target]
