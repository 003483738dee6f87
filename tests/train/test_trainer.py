"""The training loop on warm ranks: evaluation, counting, resuming, failing."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid5d.train.run_folder import RunFolder
from tests.checkpoint.test_retention import put as put_step
from tests.harness import RankFailure, run_ranks
from tests.launch_kit import CP2, PP2, TP2, metrics, write_run


def train(rank: int, world: int, path: str, words: tuple[str, ...], poison: bool = False) -> dict[str, Any]:
    """What a worker does after its checks, on a rank that has a process group."""
    import hybrid5d
    from hybrid5d.data.build import eval_loader_from_plan, loader_from_plan
    from hybrid5d.load import load_config
    from hybrid5d.plan.run import build_plan
    from hybrid5d.train.resuming import resume
    from hybrid5d.train.trainer import Trainer

    plan = build_plan(load_config(path, words), world)
    engine = hybrid5d.initialize(plan)
    folder = RunFolder.of(plan)
    if rank == 0:
        folder.prepare(plan)
    dp = plan.layout.coordinate(rank).dp
    loader = loader_from_plan(plan, dp)
    resumed = resume(engine, folder, loader)
    eval_loader = eval_loader_from_plan(plan, dp) if plan.config.data.val_data_paths else None
    if poison:
        next(iter(engine.module.parameters())).data.fill_(math.nan)
    return {"notices": resumed.notices, **Trainer(engine, loader, folder, eval_loader=eval_loader).run()}


train.needs_group = True  # type: ignore[attr-defined]
LAYOUTS = [(1, ()), (2, (TP2,)), (2, (CP2,)), (2, (PP2,)), (2, ())]


@pytest.mark.parametrize("world, words", LAYOUTS, ids=["one", "tp2", "cp2", "pp2", "dp2"])
def test_evaluation_equals_training_at_frozen_weights(tmp_path: Path, world: int, words: tuple[str, ...]) -> None:
    """The same rows, gas 8 or 4; loss is the token mean, tokens are counted once, valid ones apart."""
    path = write_run(tmp_path / "a", rows=21)
    rows = [len(json.loads(x)["input_ids"]) for x in (tmp_path / "a" / "rows.jsonl").read_text().splitlines()]
    frozen = ("actor.optim.lr=0", "actor.lr_sched.min_lr=0", "runner.max_steps=-1", "runner.max_epochs=1")
    val = (f"data.val_data_paths=[{tmp_path}/a/rows.jsonl]", "runner.val_check_interval=2")
    run_ranks(world, train, world, str(path), (*words, *frozen, *val))
    folder = tmp_path / "a" / "run"
    steps = metrics(folder)
    evals = [json.loads(x) for x in (folder / "eval.jsonl").read_text().splitlines()]
    assert len(steps) == 3 and [e["step"] for e in evals] == [0, 2, 3]
    assert sum(s["valid_tokens"] for s in steps) == sum(rows) - len(rows) == evals[0]["valid_tokens"]
    assert sum(s["tokens"] for s in steps) == sum(rows)
    mean = sum(s["loss"] * s["valid_tokens"] for s in steps) / evals[0]["valid_tokens"]
    for e in evals:
        assert e["loss"] == pytest.approx(mean, abs=1e-5) and e["rows"] == 21
        assert e["perplexity"] == pytest.approx(math.exp(e["loss"]))


def test_a_resumed_run_leaves_the_same_lines(tmp_path: Path) -> None:
    """Four steps at once, and two and two in another layout: every step once, the same rows, losses and rates."""
    whole, parts = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    run_ranks(1, train, 1, str(whole), ())
    save = ("runner.save_interval=2", "runner.resume_dir=auto", "actor.lr_sched.lr_decay_iters=4")
    run_ranks(2, train, 2, str(parts), (*save, TP2, "runner.max_steps=3"))
    lines = tmp_path / "b" / "run" / "metrics.jsonl"
    lines.write_text(lines.read_text() + '{"step": 4, "loss": 1')  # a killed run's last words
    checkpoint = "runner.resume_dir=" + str(tmp_path / "b" / "run" / "checkpoints" / "global_step_2")
    aside = "checkpoints after step 2 are kept in earlier-1/"
    notices = [r["notices"] for r in run_ranks(2, train, 2, str(parts), (PP2, checkpoint))]
    assert [len(n) for n in notices] == [1, 0] and notices[0][0].endswith(aside)
    assert (tmp_path / "b" / "run" / "earlier-1" / "checkpoints" / "global_step_3").is_dir()
    got, want = metrics(tmp_path / "b" / "run"), metrics(tmp_path / "a" / "run")
    for key in ("step", "rows_seen", "lr", "tokens"):
        assert [g[key] for g in got] == [w[key] for w in want]
    assert [g["loss"] for g in got] == pytest.approx([w["loss"] for w in want], abs=1e-5)


def _full_disk(rank: int, world: int, path: str, words: tuple[str, ...], bad: tuple[int, ...]) -> dict[str, Any]:
    """Trains; rank 1 cannot write the saves of these numbers (0 = the first)."""
    from hybrid5d.checkpoint import save, shards
    from hybrid5d.checkpoint.safetensors_writer import SafetensorsWriter
    from hybrid5d.train.metrics import Console

    number, write, planned = [-1], SafetensorsWriter.write, save.planned_files

    def counted(*args: Any) -> Any:
        number[0] += 1
        return planned(*args)

    def fails(self: Any, *args: Any) -> None:
        if rank == 1 and number[0] in bad:
            raise OSError(28, "No space left on device")
        write(self, *args)

    told: list[str] = []
    save.planned_files, shards.SafetensorsWriter.write = counted, fails  # type: ignore[method-assign]
    Console.say = lambda self, text: told.append(text)  # type: ignore[method-assign]
    return {**train(rank, world, path, words), "told": told}


_full_disk.needs_group = True  # type: ignore[attr-defined]
SAVE = ("runner.save_interval=1", "runner.max_steps=5", "runner.keep_last=1", TP2)


def test_saves_that_fail_are_said_left_out_and_the_whole_one_stays(tmp_path: Path) -> None:
    """Saves of steps 2 and 3 fail on rank 1: step 1 stays until step 4 is whole, and nothing else lies about."""
    path = str(write_run(tmp_path / "a"))
    results = run_ranks(2, _full_disk, 2, path, (*SAVE, "runner.on_save_error=continue"), (1, 2))
    assert [r["exit_code"] for r in results] == [0, 0]
    root = tmp_path / "a" / "run" / "checkpoints"
    assert {p.name for p in root.iterdir()} == {"global_step_5", "latest"}
    told = [line for line in results[0]["told"] if "is not saved" in line]
    assert [line.split(",")[0] for line in told] == ["notice: step 2 is not saved", "notice: step 3 is not saved"], told
    assert all("goes on from the checkpoint of step 1: rank 1: " in line and "No space" in line for line in told)


ASYNC = "runner.async_save=true"


def test_background_saves_that_fail_are_said_at_a_later_step_with_the_rank(tmp_path: Path) -> None:
    """As above; the last step's, which nothing comes after, is saved once more while all wait."""
    path = str(write_run(tmp_path / "a"))
    words = (*SAVE, "runner.on_save_error=continue", "runner.max_steps=6", ASYNC)
    results = run_ranks(2, _full_disk, 2, path, words, (1, 2, 5))
    assert [r["exit_code"] for r in results] == [0, 0]
    root = tmp_path / "a" / "run" / "checkpoints"
    assert {p.name for p in root.iterdir()} == {"global_step_6", "latest"}
    told = [line for line in results[0]["told"] if "is not saved" in line]
    assert [line.split(",")[0] for line in told] == [f"notice: step {n} is not saved" for n in (2, 3, 6)], told
    assert all(": rank 1: " in line and "No space" in line for line in told)
    path = str(write_run(tmp_path / "b"))
    with pytest.raises(RankFailure, match="No space left on device"):
        run_ranks(2, _full_disk, 2, path, (*SAVE, ASYNC), (1,))
    root = tmp_path / "b" / "run" / "checkpoints"
    assert {p.name for p in root.iterdir()} == {"global_step_1", "latest"}


def _slow_disk(rank: int, path: str, words: tuple[str, ...], leave: str) -> dict[str, Any]:
    """Trains; rank 1 writes slowly. `leave`: how the run ends, in step 3 (or in 2, whose save was begun)."""
    import torch

    from hybrid5d.engine.engine import Engine
    from hybrid5d.train import trainer
    from hybrid5d.train.metrics import Console
    from hybrid5d.train.requests import Request, Requests
    from tests.checkpoint.test_async import slow_writes

    class Tracked:
        def log(self, step: int, values: dict[str, float]) -> None:
            tracked.append((step, values))

        def close(self) -> None:
            return

    told: list[str] = []
    tracked: list[tuple[int, dict[str, float]]] = []
    train_batch, asked = Engine.train_batch, Requests.asked.fget  # type: ignore[attr-defined]
    steps, at = [0], {"stop": 3, "stop at its step": 2}.get(leave)

    def counted(self: Any, batch: Any) -> Any:
        steps[0] = self.global_step + 1
        if leave == "numbers" and steps[0] == 3 and rank == 0:
            next(p for p in self.module.parameters()).data.fill_(torch.nan)
        return train_batch(self, batch)

    def stop(self: Any) -> Request:
        return Request.STOP if steps[0] == at and rank == 0 else asked(self)

    Engine.train_batch, Requests.asked = counted, property(stop)  # type: ignore[assignment, method-assign]
    Console.say = lambda self, text: told.append(text)  # type: ignore[method-assign]
    trainer.open_trackers = lambda *_: [Tracked()]
    slow_writes(0.05 if rank else 0.0)
    return {**train(rank, 2, path, words), "told": told, "tracked": tracked}


_slow_disk.needs_group = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("leave", ["end", "stop", "stop at its step", "numbers"])
def test_every_way_out_waits_for_a_save_that_is_being_written(tmp_path: Path, leave: str) -> None:
    path, root = str(write_run(tmp_path / "a")), tmp_path / "a" / "run" / "checkpoints"
    words = ("runner.save_interval=2", "runner.keep_last=1", TP2, ASYNC)
    if leave == "numbers":
        with pytest.raises(RankFailure, match="step 3: actor: loss nan"):
            run_ranks(2, _slow_disk, path, words, leave)
    else:
        result, _ = run_ranks(2, _slow_disk, path, words, leave)
        assert result["exit_code"] == (0 if leave == "end" else 3)
        saved = [int(line.rpartition("_")[2]) for line in result["told"] if line.startswith("checkpoint: ")]
        assert saved == {"end": [2, 4], "stop": [2, 3], "stop at its step": [2]}[leave]
        assert any(line.startswith("waited ") and "for the checkpoint of step 2" in line for line in result["told"])
        seconds = [(step, v) for step, v in result["tracked"] if "save/seconds" in v]
        assert [step for step, _ in seconds] == saved
        for _, values in seconds:
            assert values["save/seconds"] > values["save/blocked_seconds"] > 0
            assert values["save/bytes"] == sum(p.stat().st_size for p in root.rglob("*.safetensors"))
    newest = {"end": 4, "stop": 3}.get(leave, 2)
    assert {p.name for p in root.iterdir()} == {f"global_step_{newest}", "latest"}


def test_a_save_that_fails_ends_the_run_and_the_whole_one_stays(tmp_path: Path) -> None:
    """By default; with `continue`, where the last step's fails and once more at the end: nothing comes after it."""
    for name, words, bad, left in (("a", (), (1,), 1), ("b", ("runner.on_save_error=continue",), (4, 5), 4)):
        path = str(write_run(tmp_path / name))
        with pytest.raises(RankFailure, match="No space left on device"):
            run_ranks(2, _full_disk, 2, path, (*SAVE, *words), bad)
        root = tmp_path / name / "run" / "checkpoints"
        assert {p.name for p in root.iterdir()} == {f"global_step_{left}", "latest"}


def _nothing_can_go(rank: int, path: str) -> dict[str, Any]:
    """Trains where no checkpoint can be removed, for one reason and another."""
    from hybrid5d.errors import CheckpointError
    from hybrid5d.train import saver

    reasons: list[Exception] = [OSError(30, "Read-only file system", "x"), CheckpointError("x cannot be read")]

    def fails(*_: Any) -> None:
        raise reasons.pop(0)

    told: list[str] = []
    saver.prune, saver.Console.say = fails, lambda self, text: told.append(text)  # type: ignore
    words = ("runner.save_interval=1", "runner.max_steps=2", "runner.keep_last=1")
    return {**train(rank, 1, path, words), "told": [line for line in told if line.startswith("notice")]}


_nothing_can_go.needs_group = True  # type: ignore[attr-defined]


def test_what_cannot_be_removed_ends_no_run(tmp_path: Path) -> None:
    (result,) = run_ranks(1, _nothing_can_go, str(write_run(tmp_path / "a")))
    start = "notice: older checkpoints stay: "
    assert result["exit_code"] == 0 and result["steps"] == 2
    assert result["told"] == [f"{start}[Errno 30] Read-only file system: 'x'", f"{start}x cannot be read"]


def test_a_resumed_run_says_what_changed(tmp_path: Path) -> None:
    """Other data, order or batch: the run goes on, and not in silence."""
    path = write_run(tmp_path / "a", rows=21)
    run_ranks(1, train, 1, str(path), ("runner.save_interval=2", "runner.max_steps=2"))
    file = tmp_path / "a" / "rows.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[1:]))
    lost, tokens = len(json.loads(lines[0])["input_ids"]), sum(len(json.loads(x)["input_ids"]) for x in lines)
    words = ("runner.resume_dir=auto", "runner.max_steps=3", "data.seed=7", "actor.global_batch_size=4")
    (result,) = run_ranks(1, train, 1, str(path), words)
    (notice,) = result["notices"]
    start = "rows differ from those that the checkpoint was made with: "
    end = "; step 3 takes its place in the new order"
    assert notice.startswith(start) and notice.endswith(end)
    changes = notice.removeprefix(start).removesuffix(end).split(", ")
    told = {c.split("=")[0]: c.split("=")[1] for c in changes}
    assert told.pop("hash of the rows' lengths") and told.pop("hash of the tokens")
    assert told.pop("data.seed").startswith("7 ") and told.pop("actor.global_batch_size") == "4 (was 8)"
    assert told == {"rows": "20 (was 21)", "tokens": f"{tokens - lost} (was {tokens})"}


def test_a_critic_that_is_left_behind_is_said(tmp_path: Path) -> None:
    """Neither where the run has one, nor in an evaluation, which saves nothing."""
    from hybrid5d.train.resuming import resume

    source = put_step(tmp_path / "checkpoints", 2, "") / "actor"
    config = SimpleNamespace(runner=SimpleNamespace(resume_dir="auto"))
    loader: Any = SimpleNamespace(identity=dict)

    def told(critic: object, *more: Any) -> tuple[str, ...]:
        plan = SimpleNamespace(config=config)
        engine: Any = SimpleNamespace(plan=plan, critic=critic, global_step=2, load_checkpoint=lambda _: {})
        return resume(engine, RunFolder(tmp_path), *more).notices

    assert told(None, loader) == ()
    shutil.copytree(source, source.parent / "critic")
    assert told(object(), loader) == told(None) == ()
    (notice,) = told(None, loader)
    assert notice.startswith(f"{source.parent / 'critic'} is not loaded, and no later checkpoint holds it")
    assert "critic.use_critic_model" in notice


def _one_rank_sees_no_critic(rank: int, folders: tuple[str, str]) -> str:
    """What this rank raises: an engine with a critic whose load meets the other rank's, as every load does."""
    from hybrid5d.engine.engine import Engine
    from hybrid5d.errors import CheckpointError
    from hybrid5d.parallel.agree import gather_objects, world_axis

    critic = SimpleNamespace(load_checkpoint=lambda folder: gather_objects(folder, world_axis()))
    engine: Any = SimpleNamespace(critic=critic)
    try:
        Engine.load_checkpoint(engine, folders[rank])
    except CheckpointError as exc:
        return str(exc)
    return "loaded"


_one_rank_sees_no_critic.needs_group = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("missing", ["actor", "critic"])
def test_a_checkpoint_that_one_rank_alone_cannot_see_ends_all(tmp_path: Path, missing: str) -> None:
    folders = tuple(str(put_step(tmp_path / name, 2, "")) for name in ("a", "b"))
    for folder in folders:
        shutil.copytree(f"{folder}/actor", f"{folder}/critic")
    shutil.rmtree(Path(folders[1]) / missing)
    first, second = run_ranks(2, _one_rank_sees_no_critic, folders, timeout=30)
    assert re.match(r"rank 1: .*(holds no critic|is no complete checkpoint)", first) and first == second


@pytest.mark.parametrize("state", [{}, {"data": 17}, {"data": ["shard", 3]}])
def test_a_checkpoint_with_a_state_of_ones_own_is_resumed(tmp_path: Path, state: dict[str, Any]) -> None:
    """Saved by a loop that is not ours: its `data` is whatever that loop wrote."""
    path = write_run(tmp_path / "a")
    run_ranks(1, save_with, str(path), state)
    (result,) = run_ranks(1, train, 1, str(path), ("runner.resume_dir=auto", "runner.max_steps=1"))
    assert result["steps"] == 1 and result["notices"] == ()


def save_with(rank: int, path: str, state: dict[str, Any]) -> None:
    """A checkpoint of step 0 with a state of one's own."""
    import hybrid5d
    from hybrid5d.load import load_config
    from hybrid5d.plan.run import build_plan

    engine = hybrid5d.initialize(build_plan(load_config(path), 1))
    engine.save_checkpoint(Path(path).parent / "run" / "checkpoints", state)


save_with.needs_group = True  # type: ignore[attr-defined]


def test_the_end_leaves_a_checkpoint_and_a_model(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a")
    results = run_ranks(2, train, 2, str(path), (TP2, "runner.save_interval=3"))
    folder = tmp_path / "a" / "run"
    assert (folder / "checkpoints" / "latest").read_text().strip() == "global_step_4"
    assert results[0]["hf"] == str(folder / "hf") and results[0]["steps"] == 4
    done = run_ranks(2, train, 2, str(path), (TP2, "runner.save_interval=3", "runner.resume_dir=auto"))
    assert done[0]["loss"] == results[0]["loss"], "nothing was left to do: the result is that of the run"
    assert len(metrics(folder)) == 4


def test_numbers_that_are_not_finite_stop_the_run(tmp_path: Path) -> None:
    """Also where they are skipped, when there is no end of them; what was wrong is named."""
    path = write_run(tmp_path / "a")
    named = r"loss nan, gradient norm inf, rank 0: model.embed_tokens.weight is not finite; the last good state is"
    with pytest.raises(RankFailure, match=f"step 1: actor: {named} the start"):
        run_ranks(1, train, 1, str(path), (), True)
    with pytest.raises(RankFailure, match=f"step 10, the 10th such step in a row: actor: {named}"):
        run_ranks(1, train, 1, str(path), ("runner.on_nonfinite=skip", "runner.max_steps=12"), True)
    assert [m["skipped_steps"] for m in metrics(tmp_path / "a" / "run")] == list(range(1, 11))


def _skips(rank: int, path: str, words: tuple[str, ...]) -> dict[str, Any]:
    """Trains; the gradients of step 2 are not finite. Returns the notices, too."""
    import torch

    from hybrid5d.engine.engine import Engine
    from hybrid5d.train.metrics import Console

    told: list[str] = []
    train_batch = Engine.train_batch

    def once(self: Any, batch: Any) -> Any:
        param, bad = [p for p in self.module.parameters() if p.dim() == 1][-1], self.global_step == 1
        hook = param.register_hook(lambda g: g * torch.nan if bad else g)
        try:
            return train_batch(self, batch)
        finally:
            hook.remove()

    Engine.train_batch = once  # type: ignore[assignment, method-assign]
    Console.say = lambda self, text: told.append(text)  # type: ignore[method-assign]
    return {**train(rank, 1, path, words), "told": told}


_skips.needs_group = True  # type: ignore[attr-defined]


def test_a_skipped_step_is_said_and_a_resumed_run_counts_it(tmp_path: Path) -> None:
    """Rows go on, the learning rate does not; the same after a save and a resume."""
    path, skip = write_run(tmp_path / "a"), ("runner.on_nonfinite=skip", "runner.save_interval=3")
    (result,) = run_ranks(1, _skips, str(path), skip)
    (notice,) = [line for line in result["told"] if line.startswith("notice")]
    seen = metrics(tmp_path / "a" / "run")
    assert notice.startswith("notice: step 2 is skipped, nothing of the model changed: actor: loss ")
    assert "rank 0, micro-batch 1 of 8 (rows " in notice and "gradient of model.norm.weight is not finite" in notice
    assert f"(rows {seen[1]['rows_seen'][0]})" in notice
    assert [m["lr"] for m in seen][1] == [m["lr"] for m in seen][2] > 0 and [m["step"] for m in seen] == [1, 2, 3, 4]
    assert [m.get("skipped_steps", 0) for m in seen] == [0, 1, 1, 1]
    assert [m.get("skipped") for m in seen] == [None, True, None, None]
    at = f"runner.resume_dir={tmp_path}/a/run/checkpoints/global_step_3"
    run_ranks(1, train, 1, str(path), (*skip, at))
    again = metrics(tmp_path / "a" / "run")[-1]
    assert {k: again[k] for k in ("step", "lr", "loss", "rows_seen", "skipped_steps")} == {
        k: seen[-1][k] for k in ("step", "lr", "loss", "rows_seen", "skipped_steps")
    }


def test_a_critic_s_step_is_skipped_and_said_too() -> None:
    from hybrid5d.engine.results import StepResult
    from hybrid5d.plan.deepspeed_config import PrecisionPlan
    from hybrid5d.train.saver import TrainingError
    from hybrid5d.train.trainer import Trainer

    told: list[str] = []
    engine = SimpleNamespace(plan=SimpleNamespace(precision=PrecisionPlan("bf16")))
    run: Any = SimpleNamespace(
        engine=SimpleNamespace(plan=engine.plan, critic=engine), runner=SimpleNamespace(on_nonfinite="skip"),
        _skipped=0, console=SimpleNamespace(say=told.append), _metrics=None, _track=lambda *_: None,
        saver=SimpleNamespace(last_good="the start"),
    )  # fmt: skip
    numbers: dict[str, Any] = {
        "step": 3, "loss": 2.0, "valid_tokens": 9, "tokens": 9, "step_time_s": 1.0, "peak_memory_bytes": 1,
        "rows_seen": (), "lr": 0.1,
    }  # fmt: skip
    lost = StepResult(**numbers, grad_norm=math.inf, skipped=True, origin="rank 1: x is not finite")
    Trainer._log(run, StepResult(**numbers, grad_norm=1.0, critic=lost))
    assert told == [
        "notice: step 3 is skipped, nothing of the model changed: critic: loss 2.0, gradient norm inf, "
        "rank 1: x is not finite"
    ]
    Trainer._log(run, StepResult(**numbers, grad_norm=1.0))
    assert run._skipped == 0
    with pytest.raises(TrainingError, match=r"step 3: critic: loss 2\.0"):  # what was not skipped cannot be
        Trainer._log(run, StepResult(**numbers, grad_norm=1.0, critic=StepResult(**numbers, grad_norm=math.inf)))


def _one_bit(rank: int, path: str, words: tuple[str, ...]) -> dict[str, Any]:
    """Trains; one bit of rank 1's copy of a norm flips after step 4."""
    import torch

    from hybrid5d.engine.engine import Engine

    train_batch = Engine.train_batch

    def flips(self: Any, batch: Any) -> Any:
        result = train_batch(self, batch)
        if rank == 1 and result.step == 4:
            next(p for p in self.module.parameters() if p.dim() == 1).data.view(torch.uint8)[2] ^= 1
        return result

    Engine.train_batch = flips  # type: ignore[assignment, method-assign]
    return train(rank, 2, path, words)


_one_bit.needs_group = True  # type: ignore[attr-defined]


def test_copies_are_compared_before_a_save_and_a_flipped_bit_ends_the_run(tmp_path: Path) -> None:
    """Every third step is compared, every second saved: step 4's checkpoint does not come to be."""
    path = str(write_run(tmp_path / "a"))
    words = ("runner.check_replicas_every=3", "runner.save_interval=2", "runner.max_steps=6", TP2)
    told = r"after step 4 copies .*\n  weight of model.layers.0.input_layernorm.weight: rank 0 against rank 1"
    with pytest.raises(RankFailure, match=rf"(?s){told}.*The last good state is the checkpoint of step 2"):
        run_ranks(2, _one_bit, path, words)
    assert (tmp_path / "a" / "run" / "checkpoints" / "latest").read_text() == "global_step_2\n"
    (tmp_path / "b").mkdir()
    run_ranks(2, _one_bit, str(write_run(tmp_path / "b" / "a")), words[1:])  # not asked for: not seen


def _stopped_in_the_export(rank: int, path: str, words: tuple[str, ...]) -> dict[str, Any]:
    """Trains; rank 1 alone is asked to stop when the first bucket of the model is exported."""
    from hybrid5d.checkpoint import hf_tensors
    from hybrid5d.train import trainer
    from hybrid5d.train.requests import Request, Requests
    from hybrid5d.train.trainer import Trainer

    requests, bucket, init = Requests(), hf_tensors.HfTensors._bucket, Trainer.__init__
    buckets: list[int] = []

    def asked(self: Any, *args: Any) -> Any:
        buckets.append(1)
        if rank == 1:
            requests.ask(Request.STOP)
        return bucket(self, *args)

    hf_tensors.HfTensors._bucket = asked  # type: ignore[method-assign]
    hf_tensors.HfTensors.stream.__defaults__ = (2000, lambda: None)  # type: ignore[attr-defined]
    trainer.Trainer.__init__ = lambda *a, **k: init(*a, **{**k, "requests": requests})  # type: ignore[assignment, method-assign]
    return {**train(rank, 2, path, words), "buckets": len(buckets)}


_stopped_in_the_export.needs_group = True  # type: ignore[attr-defined]


def test_a_stop_in_the_export_is_answered_with_everything_saved(tmp_path: Path) -> None:
    """The next bucket is not begun, nothing half-written stays, and starting again exports."""
    path, folder = str(write_run(tmp_path / "a")), tmp_path / "a" / "run"
    words = ("runner.save_interval=4", TP2)
    for result in run_ranks(2, _stopped_in_the_export, path, words):
        assert (result["exit_code"], result["buckets"], result["steps"]) == (3, 1, 4)
        assert result["checkpoint"] == str(folder / "checkpoints" / "global_step_4")
    assert not [p.name for p in folder.iterdir() if p.name.startswith("hf")]
    result, _ = run_ranks(2, train, 2, path, (*words, "runner.resume_dir=auto"))
    assert result["exit_code"] == 0 and result["hf"] == str(folder / "hf")
