"""Saves that are written while training goes on: bitwise the state of their step, and whole or not there at all."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.engine_kit import Layout, build_engine
from tests.harness import RankFailure, run_ranks
from tests.kit import Recipe, make_rows, step_batch

FAST = Recipe(optimizer="adamw", lr=0.5, clip=0.9)  # later weights are far from the saved ones


def slow_writes(seconds: float) -> None:
    """Each tensor of this rank takes as long to be written."""
    from hybrid5d.checkpoint.safetensors_writer import SafetensorsWriter

    write = SafetensorsWriter.write

    def slowly(self: Any, *args: Any) -> None:
        time.sleep(seconds)
        write(self, *args)

    SafetensorsWriter.write = slowly  # type: ignore[method-assign]


def _both_ways(rank: int, layout: Layout, folder: str, root: str) -> None:
    """Step 2 saved at once, and in the background by writes that begin when steps 3 and 4 are over."""
    from hybrid5d.checkpoint.safetensors_writer import SafetensorsWriter

    engine = build_engine(layout, FAST, folder, 8)

    def train(step: int) -> None:
        rows = make_rows(8, 24, 101, seed=step)
        engine.train_batch(step_batch(rows, layout.dp, engine.ctx.dp.rank, layout.micro))

    train(1), train(2)
    engine.save_checkpoint(f"{root}/now", {"rows": [1, 2]})
    write, gate, state = SafetensorsWriter.write, threading.Event(), {"rows": [1, 2]}
    SafetensorsWriter.write = lambda *args: (gate.wait(), write(*args))[1]  # type: ignore[assignment, method-assign]
    save = engine.begin_save(f"{root}/later", state, background=True)
    state["rows"].append(3)
    train(3), train(4)
    assert save.busy
    gate.set()
    assert save.finish().path == Path(root) / "later" / "global_step_2" and not save.busy


LAYOUTS = [
    Layout(),  # a view of the very weights would do while the write blocks
    Layout(pp=2, precision="bf16"),
    Layout(dp=2, zero=2, extra={"freeze_parameters": ["model.layers.0.*"]}),
    Layout(cp=2, zero=3),
    Layout(tp=2, dp=2, zero=2, precision="bf16"),
]


@pytest.mark.parametrize(
    "layout",
    [pytest.param(x, id=str(x), marks=[pytest.mark.full] if i in (1, 3, 4) else []) for i, x in enumerate(LAYOUTS)],
)
def test_what_is_written_later_is_the_state_of_its_step(
    layout: Layout, folders: dict[str, Path], tmp_path: Path
) -> None:
    run_ranks(layout.world, _both_ways, layout, str(folders["qwen3"]), str(tmp_path), timeout=240)
    now, later = (tmp_path / name / "global_step_2" / "actor" for name in ("now", "later"))
    names = sorted(p.name for p in now.iterdir() if p.is_file())
    assert names == sorted(p.name for p in later.iterdir() if p.is_file()) and len(names) > 2
    for name in names:
        if name.endswith(".safetensors"):
            assert (now / name).read_bytes() == (later / name).read_bytes(), name
    said = [json.loads((folder / "manifest.json").read_text()) for folder in (now, later)]
    assert said[1].pop("follows") == said[0].pop("id") != said[1].pop("id") and said[0].pop("follows") == ""
    assert said[0] == said[1]
    assert (tmp_path / "later" / "latest").read_text() == "global_step_2\n"


def _many(rank: int, folder: str, root: str) -> tuple[list[int], list[int]]:
    engine = build_engine(Layout(tp=2), FAST, folder, 8)
    counted: tuple[list[int], list[int]] = [], []
    for number in range(30):
        save = engine.begin_save(root, number=number % 3, background=True)
        while save.busy:
            time.sleep(0.005)
        save.finish()
        counted[0].append(threading.active_count())
        counted[1].append(len(os.listdir("/proc/self/fd")))
    return counted


def test_threads_and_files_do_not_grow(folders: dict[str, Path], tmp_path: Path) -> None:
    for threads, files in run_ranks(2, _many, str(folders["qwen3"]), str(tmp_path), timeout=200):
        assert max(threads[10:]) <= max(threads[:10]) and max(files[10:]) <= max(files[:10])


def _dies(rank: int, folder: str, root: str, where: str) -> None:
    from hybrid5d.checkpoint import save as saving

    engine = build_engine(Layout(tp=2), FAST, folder, 8)
    engine.save_checkpoint(root, {"n": 0})
    engine.global_step = 1
    slow_writes(0.02 if rank else 0.0)

    def die(*_: Any) -> None:
        os._exit(9)

    if rank == 0 and where == "publish":
        saving.publish = die
    save = engine.begin_save(root, {"n": 1}, background=True)
    if where == "other" and rank == 0:
        while save.busy:
            time.sleep(0.01)
        os._exit(9)  # its own part is written, rank 1's is not
    save.finish()


@pytest.mark.parametrize("where", ["other", "publish"])
def test_a_death_while_it_is_written_leaves_the_one_before(
    where: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(RankFailure, match=r"died without a message|failed"):
        run_ranks(2, _dies, str(folders["qwen3"]), str(tmp_path), where, timeout=60)
    assert (tmp_path / "latest").read_text() == "global_step_0\n"
    assert {p.name for p in tmp_path.iterdir()} == {"global_step_0", "global_step_1.tmp", "latest"}
