"""Checkpoints: any layout to any layout, equal to the unbroken run; atomic; faults are one line on every rank."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybrid5d.check.compare import relative
from hybrid5d.checkpoint.manifest import SHARE
from hybrid5d.parallel.shard import pieces_of
from tests.engine_kit import Layout, Shards, assemble, build_engine
from tests.harness import RankFailure, run_ranks
from tests.kit import MODELS, Recipe, make_rows, save_model, step_batch

ADAM = Recipe("adam", lr=1e-3, clip=0.5, weight_decay=0.1, eps=1e-6, steps=4)
SGD = Recipe("sgd", lr=0.1, steps=4)
STEPS = [make_rows(8, 20, 101, seed) for seed in range(4)]


def _state_of(engine: Any) -> dict[str, Shards]:
    """Every master and moment this rank holds whole, by kind."""
    access = engine.state.optimizer
    found: dict[str, Shards] = {}
    for kind in ("weight", *access.moments()):
        found[kind] = []
        for p in engine.module.parameters():
            if pieces_of(p) and (p.requires_grad or kind == "weight"):
                whole = access.gather(p, kind, 0)
                if whole is not None:
                    values = whole.float().reshape(getattr(p, "ds_shape", p.shape))
                    found[kind] += [(piece, piece.local_view(values).numpy().copy()) for piece in pieces_of(p)]
    return found


def _run(
    rank: int, layout: Layout, recipe: Recipe, folder: str, resume: str | None, steps: range, save: str | None
) -> dict[str, Any]:
    engine = build_engine(layout, recipe, folder, len(STEPS[0]))
    given = engine.load_checkpoint(resume) if resume else None
    assert engine.global_step == steps.start
    results = []
    for k in steps:
        results.append(engine.train_batch(step_batch(STEPS[k], layout.dp, engine.ctx.dp.rank, layout.micro)))
    if save:
        engine.save_checkpoint(save, {"epoch": 3, "rows": [1, 2]})
    return {
        "losses": [(r.step, r.loss, r.grad_norm, r.lr) for r in results],
        "state": _state_of(engine),
        "given": given,
    }


def run(layout: Layout, recipe: Recipe, folder: Path, steps: range, resume: Any = None, save: Any = None) -> Any:
    """Train `steps` in a layout; per-step numbers, full tensors by kind and name, and the restored caller state."""
    ranks = run_ranks(
        layout.world, _run, layout, recipe, str(folder), resume and str(resume), steps, save and str(save), timeout=200
    )
    kinds = ranks[0]["state"]
    state = {kind: assemble([r["state"][kind] for r in ranks]) for kind in kinds}
    return ranks[0]["losses"], state, ranks[0]["given"]


def same(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    """Numbers per step and every tensor of every kind agree."""
    np.testing.assert_allclose(got[0], want[0], rtol=tolerance, atol=tolerance)
    assert got[1].keys() == want[1].keys()
    for kind in want[1]:
        assert got[1][kind].keys() == want[1][kind].keys()
        far = {n: relative(t, want[1][kind][n]) for n, t in got[1][kind].items()}
        assert max(far.values()) <= tolerance, (kind, {n: d for n, d in far.items() if d > tolerance})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied Qwen3 with kv heads < tp 4, odd vocabulary."""
    return save_model(MODELS["qwen3"], tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def unbroken(model: Path) -> Any:
    """Four steps in one process."""
    return run(Layout(), ADAM, model, range(4))


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps at tp2 pp2 dp2, then a checkpoint."""
    root = tmp_path_factory.mktemp("saved")
    run(Layout(tp=2, pp=2, dp=2, sp=True), ADAM, model, range(2), save=root)
    return root


TARGETS = [
    Layout(tp=2, pp=2, dp=2, sp=True),
    Layout(),
    Layout(pp=4),
    Layout(pp=2, model={"virtual_pipeline_model_parallel_size": 2}),
    Layout(tp=4),
    Layout(dp=2),
    Layout(cp=2, dp=2),
    Layout(tp=2, dp=2, zero=2),
    Layout(tp=2, dp=2, zero=3),
]


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_any_layout_goes_on_from_any_other(model: Path, saved: Path, unbroken: Any, target: Layout) -> None:
    got = run(target, ADAM, model, range(2, 4), resume=saved)
    same(got, (unbroken[0][2:], unbroken[1]))
    assert got[2] == {"epoch": 3, "rows": [1, 2]}


SOURCES = [
    Layout(),
    Layout(tp=4, dp=2),
    Layout(cp=2, dp=2),
    Layout(pp=2, zero=0),
    Layout(pp=2, model={"pipeline_schedule": "zbv"}),
    Layout(pp=2, model={"pipeline_schedule": "gpipe"}),
    Layout(dp=4, zero=2),
    Layout(dp=2, zero=3),
]


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_every_layout_writes_what_others_read(model: Path, unbroken: Any, tmp_path: Path, source: Layout) -> None:
    run(source, ADAM, model, range(2), save=tmp_path)
    same(run(Layout(tp=2, pp=2), ADAM, model, range(2, 4), resume=tmp_path), (unbroken[0][2:], unbroken[1]))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_with_and_without_moments(model: Path, tmp_path: Path, momentum: float) -> None:
    extra = {"optim": {"optimizer": "sgd", "lr": 0.1, "clip_grad": 0.0, "sgd_momentum": momentum, "weight_decay": 0.0}}
    want = run(Layout(extra=extra), SGD, model, range(4))
    assert set(want[1]) == ({"weight", "momentum_buffer"} if momentum else {"weight"})
    run(Layout(tp=2, dp=2, extra=extra), SGD, model, range(2), save=tmp_path)
    same(run(Layout(pp=2, cp=2, extra=extra), SGD, model, range(2, 4), resume=tmp_path), (want[0][2:], want[1]))


def test_bf16_keeps_fp32_masters_and_moments(model: Path, tmp_path: Path) -> None:
    """BF16_Optimizer: the resumed run's next steps are bitwise those of the unbroken one in the same layout."""
    layout = Layout(tp=2, dp=2, precision="bf16")
    want = run(layout, ADAM, model, range(4))
    run(layout, ADAM, model, range(2), save=tmp_path)
    same(run(layout, ADAM, model, range(2, 4), resume=tmp_path), (want[0][2:], want[1]), tolerance=0.0)
    other = run(Layout(pp=2, precision="bf16"), ADAM, model, range(2, 2), resume=tmp_path)
    halfway = run(layout, ADAM, model, range(2, 2), resume=tmp_path)
    same(([], other[1]), ([], halfway[1]), tolerance=0.0)
    fp32 = run(Layout(cp=2), ADAM, model, range(2, 2), resume=tmp_path)
    same(([], fp32[1]), ([], halfway[1]), tolerance=0.0)
    assert any((t != t.astype("float16")).any() for t in halfway[1]["weight"].values())


FROZEN = {"freeze_parameters": ["model.layers.0.*", "model.embed_tokens.weight"]}


def test_frozen_parameters_are_saved_and_stay(model: Path, tmp_path: Path) -> None:
    want = run(Layout(extra=FROZEN), ADAM, model, range(4))
    run(Layout(tp=2, pp=2, extra=FROZEN), ADAM, model, range(2), save=tmp_path)
    same(run(Layout(dp=2, extra=FROZEN), ADAM, model, range(2, 4), resume=tmp_path), (want[0][2:], want[1]))
    same(run(Layout(dp=2, zero=3, extra=FROZEN), ADAM, model, range(2, 4), resume=tmp_path), (want[0][2:], want[1]))
    with pytest.raises(RankFailure, match="was frozen and has no exp_avg"):
        run(Layout(), ADAM, model, range(2, 4), resume=tmp_path)


def test_checkpoint_before_the_first_step(model: Path, unbroken: Any, tmp_path: Path) -> None:
    run(Layout(tp=2), ADAM, model, range(0), save=tmp_path)
    same(run(Layout(pp=2), ADAM, model, range(4), resume=tmp_path), unbroken)


def _train_load_train(rank: int, layout: Layout, folder: str, root: str) -> Any:
    """An engine that has moved on, then goes back to its checkpoint."""
    engine = build_engine(layout, ADAM, folder, len(STEPS[0]))
    batches = [step_batch(rows, layout.dp, engine.ctx.dp.rank, layout.micro) for rows in STEPS]
    engine.train_batch(batches[0])
    engine.save_checkpoint(root)
    first = [engine.train_batch(b).loss for b in batches[1:3]]
    assert engine.load_checkpoint(root) == {}
    again = [engine.train_batch(b).loss for b in batches[1:3]]
    from deepspeed.utils import safe_get_full_optimizer_state

    access = engine.state.optimizer
    for p in engine.module.parameters():  # DeepSpeed's own view of the moments is of the restored ones
        if pieces_of(p):
            whole, seen = access.gather(p, "exp_avg", 0), safe_get_full_optimizer_state(p, "exp_avg")
            assert whole is None or torch.equal(whole, seen.view_as(whole))
    return first, again


@pytest.mark.parametrize(
    "layout", [Layout(dp=2), Layout(dp=2, zero=3), Layout(tp=2, zero=3), Layout(pp=2, precision="bf16")], ids=str
)
def test_going_back_in_a_live_engine(model: Path, tmp_path: Path, layout: Layout) -> None:
    for first, again in run_ranks(layout.world, _train_load_train, layout, str(model), str(tmp_path)):
        assert first == again


# --- files ----------------------------------------------------------------------------------------------------------


def test_files_follow_the_shards(saved: Path) -> None:
    """Model files by tp x pp, one optimizer file per ZeRO partition, no two ranks on one file; no leftovers."""
    shards_ = [f"pp{p:02d}-tp{t:02d}" for p in range(2) for t in range(2)]
    optim = {f"optim-{s}-dp{d:02d}.safetensors" for s in shards_ for d in range(2)}
    want = {f"model-{s}.safetensors" for s in shards_} | optim | {"manifest.json", "hf"}
    assert {p.name for p in (saved / "global_step_2" / "actor").iterdir()} == want
    assert {p.name for p in saved.iterdir()} == {"global_step_2", "latest"}
    assert (saved / "latest").read_text().strip() == "global_step_2"
    manifest = json.loads((saved / "global_step_2" / "actor" / "manifest.json").read_text())
    assert manifest["step"] == 2 and manifest["layout"]["tp"] == 2 and len(manifest["files"]) == 12
    names = set(manifest["tensors"])
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert (saved / "global_step_2" / "actor" / "hf" / "config.json").is_file()


@pytest.fixture
def broken(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(saved, tmp_path / "c")
    return tmp_path / "c"


def _damage(actor: Path, how: str) -> str:
    """Break one file; returns what the message must say."""
    model, optim = actor / "model-pp01-tp00.safetensors", actor / "optim-pp00-tp01-dp01.safetensors"
    if how == "missing":
        optim.unlink()
        return "optim-pp00-tp01-dp01.safetensors: No such file"
    if how == "truncated":
        os.truncate(model, model.stat().st_size - 4)
        return "model-pp01-tp00.safetensors has .* bytes, not the .* truncated or replaced"
    if how == "bit":
        data = bytearray(optim.read_bytes())
        data[-9] ^= 1
        optim.write_bytes(data)
        return "optim-pp00-tp01-dp01.safetensors is damaged: its checksum"
    manifest = actor / "manifest.json"
    if how == "no manifest":
        manifest.unlink()
        return "global_step_2/actor is no complete checkpoint: manifest.json is missing"
    if how == "format":
        manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 99'))
        return "format 99 is not 1"
    manifest.write_text(manifest.read_text()[:500])
    return "manifest.json is damaged"


@pytest.mark.parametrize("how", ["missing", "truncated", "bit", "no manifest", "format", "half a manifest"])
def test_damaged_checkpoints_are_one_line_on_every_rank(model: Path, broken: Path, how: str) -> None:
    message = _damage(broken / "global_step_2" / "actor", how)
    for line in run_ranks(2, _load_error, Layout(tp=2), str(model), str(broken)):
        assert re.search(message, line) and "\n" not in line, line


def _load_error(rank: int, layout: Layout, folder: str, root: str) -> str:
    from hybrid5d.errors import CheckpointError

    engine = build_engine(layout, ADAM, folder, len(STEPS[0]))
    before = [p.detach().clone() for p in engine.module.parameters()]
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(root)
    assert all((a == b).all() for a, b in zip(before, engine.module.parameters())) and engine.global_step == 0
    return str(caught.value)


def _two_hosts(rank: int, layout: Layout, folder: str, places: list[str]) -> str:
    return _load_error(rank, layout, folder, places[rank])


def test_hosts_that_see_different_checkpoints_are_refused(saved: Path, model: Path, tmp_path: Path) -> None:
    """Two copies, of which one is of another moment: all its own checksums are right."""
    other = tmp_path / saved.name
    shutil.copytree(saved, other)
    manifest = next(other.rglob("manifest.json"))
    manifest.write_text(manifest.read_text().replace('"epoch": 3', '"epoch": 4'))
    lines = run_ranks(2, _two_hosts, Layout(tp=2), str(model), [str(saved), str(other)])
    assert all(line.endswith("is one checkpoint on rank 0 and another on rank 1. " + SHARE) for line in lines)


def test_another_model_or_optimizer_is_refused_with_both_layouts(saved: Path, model: Path, tmp_path: Path) -> None:
    other = save_model({**MODELS["qwen3"], "tie_word_embeddings": False, "intermediate_size": 48}, tmp_path)
    with pytest.raises(RankFailure) as caught:
        run(Layout(dp=2), ADAM, other, range(2, 3), resume=saved)
    line = str(caught.value).strip().splitlines()[-1]
    layouts = ("saved by pp2 dp2 cp1 tp2, zero 1, AdamW", "by pp1 dp2 cp1 tp1")
    for words in (*layouts, "no lm_head.weight", "mlp.gate_proj.weight"):
        assert words in line, line
    with pytest.raises(RankFailure, match="its optimizer is AdamW, this run's is SGD"):
        run(Layout(), SGD, model, range(2, 3), resume=saved)


def _load_mutated(rank: int, layout: Layout, folder: str, actor: str, names: list[str], tries: int) -> list[str]:
    """What loading says of as many files with one wrong value in the header, each with its checksum put right."""
    from hybrid5d.errors import CheckpointError

    engine, random, said = build_engine(layout, ADAM, folder, len(STEPS[0])), np.random.default_rng(5), []
    for n in range(tries):
        path, manifest = Path(actor) / names[n % len(names)], Path(actor) / "manifest.json"
        whole, listed = path.read_bytes(), manifest.read_text()
        size = int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8 : 8 + size])
        key = str(random.choice([k for k in header if "/" in k and not k.startswith("rng")]))
        entry = header[key]
        change = n // len(names) % 6
        if change == 0:
            header[key + "x"] = header.pop(key)
        elif change == 1:
            entry["shape"] = [1, *entry["shape"]]
        elif change == 2:
            entry["dtype"] = "I32" if entry["dtype"] == "F32" else "F8_E4M3"
        elif change == 3:
            entry["data_offsets"] = [entry["data_offsets"][0], entry["data_offsets"][1] + 2**40]
        elif change == 4:
            entry["shape"] = [2**40]
        else:
            entry["data_offsets"] = entry["data_offsets"][::-1]
        text = json.dumps(header, separators=(",", ":")).encode()
        content = len(text).to_bytes(8, "little") + text + whole[8 + size :]
        tree = json.loads(listed)
        tree["files"][path.name] = {"bytes": len(content), "crc32": zlib.crc32(content)}
        path.write_bytes(content)
        manifest.write_text(json.dumps(tree))
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(actor)
        said.append(str(caught.value))
        path.write_bytes(whole)
        manifest.write_text(listed)
    engine.load_checkpoint(actor)  # as it was
    return said


def test_headers_that_lie_are_refused_before_anything_is_overwritten(model: Path, broken: Path) -> None:
    actor = broken / "global_step_2" / "actor"
    names = sorted(p.name for p in actor.glob("*.safetensors"))
    (said,) = run_ranks(1, _load_mutated, Layout(), str(model), str(actor), names, 120)
    assert all(len(text.splitlines()) <= 3 and "safetensors" in text for text in said), said


# --- atomicity ------------------------------------------------------------------------------------------------------


def _failing_save(rank: int, layout: Layout, folder: str, root: str, failing_rank: int, how: str) -> str:
    from hybrid5d.checkpoint.safetensors_writer import SafetensorsWriter
    from hybrid5d.errors import CheckpointError

    engine = build_engine(layout, ADAM, folder, len(STEPS[0]))
    engine.save_checkpoint(root)
    engine.train_batch(step_batch(STEPS[0], layout.dp, engine.ctx.dp.rank, layout.micro))
    if rank == failing_rank:
        calls = {"n": 0}
        original = SafetensorsWriter.write

        def write(self: Any, *args: Any) -> None:
            calls["n"] += 1
            if calls["n"] == 3:
                raise OSError(28, "No space left on device")
            original(self, *args)

        if how == "room":
            usage = shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000)  # type: ignore[attr-defined]
            shutil.disk_usage = lambda path: usage  # type: ignore[assignment]

        def refuse(self: Any, path: Path, *args: Any) -> None:
            raise OSError(30, "Read-only file system", str(path))

        if how == "full":
            SafetensorsWriter.write = write  # type: ignore[method-assign]
        elif how != "room":
            SafetensorsWriter.__init__ = refuse  # type: ignore[method-assign]
    with pytest.raises(CheckpointError) as caught:
        if how == "export":
            engine.export_hf(root + "/hf", max_shard_size="4KB")  # so many files that every rank writes one
        else:
            engine.save_checkpoint(root)
    return str(caught.value)


@pytest.mark.parametrize("how", ["full", "read-only", "export"])
def test_a_rank_that_cannot_write_stops_all_with_its_message(model: Path, tmp_path: Path, how: str) -> None:
    layout = Layout(tp=2, pp=2, dp=2)
    lines = run_ranks(layout.world, _failing_save, layout, str(model), str(tmp_path), 5, how, timeout=100)
    assert len(set(lines)) == 1
    reason = "No space left" if how == "full" else "Read-only file system"
    assert lines[0].startswith("rank 5: ") and reason in lines[0] and "safetensors" in lines[0]
    assert {p.name for p in tmp_path.iterdir()} == {"global_step_0", "latest"}
    assert (tmp_path / "latest").read_text() == "global_step_0\n"


def test_a_save_without_room_is_refused_before_it_begins(model: Path, tmp_path: Path) -> None:
    lines = run_ranks(2, _failing_save, Layout(tp=2), str(model), str(tmp_path), 0, "room")
    found = re.fullmatch(r"rank 0: .*: a checkpoint takes (\S+) MB, 0\.0 MB are free\. Fix: .*keep_last.*", lines[0])
    written = sum(p.stat().st_size for p in (tmp_path / "global_step_0").rglob("*.safetensors"))
    assert found and lines[1] == lines[0]
    assert written < float(found[1]) * 1e6, "with the moments that the first save had not"
    assert {p.name for p in tmp_path.iterdir()} == {"global_step_0", "latest"}


def _late(rank: int, layout: Layout, folder: str, root: str, seconds: float) -> str:
    """Rank 1 sees rank 0's new folder late, rank 0 the other's files."""
    from hybrid5d.checkpoint import save
    from hybrid5d.errors import CheckpointError

    engine, begun = build_engine(layout, ADAM, folder, len(STEPS[0])), time.monotonic()
    stat = os.stat

    def late(path: Any, **options: Any) -> os.stat_result:
        hidden = str(path).endswith("actor") if rank else "tp01" in str(path)
        if hidden and time.monotonic() - begun < seconds + (0 if rank else 1.5):  # one after the other
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return stat(path, **options)

    os.stat = late  # type: ignore[assignment]
    save.SHARED_SECONDS = 4.0
    try:
        return str(engine.save_checkpoint(root).path.name)
    except CheckpointError as exc:
        return str(exc)


@pytest.mark.parametrize("seconds", [2.0, 100.0])
def test_files_that_a_shared_file_system_shows_late_are_waited_for(model: Path, tmp_path: Path, seconds: float) -> None:
    found = run_ranks(2, _late, Layout(tp=2), str(model), str(tmp_path), seconds)
    if seconds < 4:
        assert found == ["global_step_0"] * 2 and (tmp_path / "latest").read_text() == "global_step_0\n"
    else:
        assert found[0] == found[1] and "on a file system that all nodes share" in found[0]
        assert not list(tmp_path.iterdir()), "nothing half-written stays"


def _dies(rank: int, layout: Layout, folder: str, root: str, where: str) -> None:
    from hybrid5d.checkpoint import save as checkpoint
    from hybrid5d.checkpoint.safetensors_writer import SafetensorsWriter

    engine = build_engine(layout, ADAM, folder, len(STEPS[0]))
    engine.save_checkpoint(root, {"n": 0})
    engine.train_batch(step_batch(STEPS[0], layout.dp, engine.ctx.dp.rank, layout.micro))
    if rank == 0:
        original, calls = os.replace, []

        def die(*args: Any) -> None:
            os._exit(9)

        def replace(*args: Any) -> None:
            calls.append(args)
            if len(calls) == int(where[-1]):
                os._exit(9)
            original(*args)

        if where == "write":
            SafetensorsWriter.write = die  # type: ignore[method-assign]
        elif where.startswith("replace"):
            os.replace = replace  # type: ignore[assignment]
        else:
            setattr(checkpoint, where, die)
    engine.save_checkpoint(root, {"n": 1})


# The three renames are those of the manifest, of the folder and of the pointer.
@pytest.mark.parametrize("where", ["write", "publish", "replace 1", "replace 2", "replace 3"])
def test_a_crash_while_saving_leaves_the_checkpoint_before(model: Path, tmp_path: Path, where: str) -> None:
    with pytest.raises(RankFailure, match=r"died without a message|failed"):
        run_ranks(2, _dies, Layout(tp=2), str(model), str(tmp_path), where, timeout=60)
    assert (tmp_path / (tmp_path / "latest").read_text().strip() / "actor" / "manifest.json").is_file()
    # before the last rename the new folder is whole: a pointer that lags behind does not hide it
    done = 1 if where == "replace 3" else 0
    resumed = run(Layout(dp=2), ADAM, model, range(done, done + 1), resume=tmp_path)
    assert resumed[2] == {"n": done}
    # the leftovers are in nobody's way
    run(Layout(dp=2), ADAM, model, range(done, done + 1), resume=tmp_path, save=tmp_path)
    folders = {f"global_step_{step}" for step in range(done + 2)}
    assert {p.name for p in tmp_path.iterdir()} == {*folders, "latest"}


def test_saving_a_step_again_replaces_it(model: Path, saved: Path, tmp_path: Path) -> None:
    for _ in range(2):
        run(Layout(), ADAM, model, range(2, 3), resume=saved, save=tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"global_step_3", "latest"}
