"""fp16: near fp32 in every layout (losses within 4e-4, norms within 1e-3), and what a step that overflows leaves alone.

DeepSpeed refuses fp16 on a CPU; its checks are patched away in the ranks, so that all but the kernels is what runs on a
GPU: the loss scaler, the agreement on an overflow, unscaling, clipping, checkpoints.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid5d.engine.deepspeed.optimizer_state import OptimizerState
from hybrid5d.engine.results import StepResult
from hybrid5d.plan.deepspeed_config import PrecisionPlan
from hybrid5d.train.metrics import step_line, step_record
from hybrid5d.train.saver import TrainingError
from hybrid5d.train.trainer import Trainer
from tests.engine_kit import Layout, build_engine
from tests.harness import run_ranks
from tests.kit import MODELS, Recipe, document_loss_sum, hf_model, make_rows, step_batch

WARMUP = 10
SGD = Recipe(lr=0.2, clip=0.9)
EXTRA = {
    "optim": {"hysteresis": 1}, "lr_sched": {"lr_decay_style": "constant", "lr_warmup_iters": WARMUP},
}  # fmt: skip
BATCH, STEPS, OVERFLOW = 8, 5, 2  # the batch whose gradients overflow has this index


def allow_fp16() -> None:
    """DeepSpeed's and our refusals off, in this rank."""
    from deepspeed.accelerator import get_accelerator

    from hybrid5d.engine import build

    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    accelerator.supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]
    build._refuse_at_run_time = lambda *args: None  # type: ignore[assignment]


def rows_of(step: int) -> list[Any]:
    return make_rows(BATCH, 24, 101, seed=step + 1)


def _train(
    rank: int, layout: Layout, folder: str, steps: list[int], bad: int, save: str | None = None, load: str | None = None
) -> tuple[list[StepResult], dict[str, float]]:
    """Train; at step OVERFLOW rank `bad` alone gets an infinite gradient."""
    allow_fp16()
    engine = build_engine(layout, SGD, folder, BATCH)
    step = -1
    first = next(p for p in engine.module.parameters() if p.requires_grad and p.dim() == 1)  # autograd's, no product
    first.register_hook(lambda g: torch.full_like(g, torch.inf) if (step, rank) == (OVERFLOW, bad) else g)
    if load:
        engine.load_checkpoint(load)
    results = []
    for step in steps:
        batch = step_batch(rows_of(step), layout.dp, engine.ctx.dp.rank, layout.micro)
        results.append(engine.train_batch(batch))
    if save:
        engine.save_checkpoint(save)
    counters = {"step": engine.global_step, "skipped": engine.skipped_steps}
    return results, counters | OptimizerState(engine.ds.optimizer, engine.ctx.dp_cp).loss_scaler()


def reference(steps: list[int]) -> list[tuple[float, float, float]]:
    """(loss, norm, lr) of fp32 in one process, where the batch OVERFLOW is not trained on and not counted."""
    model = hf_model(MODELS["qwen3"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    found, updates = [], 0
    for step in steps:
        rows = rows_of(step)
        optimizer.zero_grad()
        valid = sum(int((d.labels >= 0).sum()) for d in rows)
        loss = sum(document_loss_sum(model, d) for d in rows) / valid
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), SGD.clip))
        optimizer.param_groups[0]["lr"] = lr = SGD.lr * updates / WARMUP
        found.append((loss.item(), norm, lr))
        if step != OVERFLOW:
            optimizer.step()
            updates += 1
    return found


LAYOUTS = [
    (Layout(precision="fp16", extra=EXTRA), 0),
    (Layout(tp=2, pp=2, sp=True, precision="fp16", extra=EXTRA), 3),
    (Layout(cp=2, dp=2, precision="fp16", extra=EXTRA), 1),
    (Layout(tp=2, dp=2, sp=True, zero=2, precision="fp16", extra=EXTRA), 2),
    (Layout(dp=2, zero=3, precision="fp16", extra=EXTRA), 1),
]


@pytest.mark.parametrize(
    "layout,bad", [*LAYOUTS[:2], *(pytest.param(*case, marks=pytest.mark.full) for case in LAYOUTS[2:])],
    ids=[str(i) for i in range(len(LAYOUTS))],
)
def test_fp16_equals_fp32_and_a_skipped_step_moves_no_schedule(
    layout: Layout, bad: int, folders: dict[str, Path]
) -> None:
    """Infinity on one rank: all skip the batch, halve the scale, and go on as if it had not been there."""
    want = reference(list(range(STEPS)))
    assert min(norm for _, norm, _ in want) > SGD.clip, "clipping must act"
    for results, counters in run_ranks(
        layout.world, _train, layout, str(folders["qwen3"]), list(range(STEPS)), bad, timeout=240
    ):
        assert [r.skipped for r in results] == [s == OVERFLOW for s in range(STEPS)]
        assert [r.loss_scale for r in results] == [2.0**16] * (OVERFLOW + 1) + [2.0**15] * (STEPS - OVERFLOW - 1)
        assert [r.step for r in results] == list(range(1, STEPS + 1))
        assert (counters["step"], counters["skipped"], counters["cur_iter"]) == (STEPS, 1, STEPS)
        for step, (result, (loss, norm, lr)) in enumerate(zip(results, want, strict=True)):
            assert result.loss == pytest.approx(loss, rel=4e-4)
            assert result.lr == pytest.approx(lr, rel=1e-12)
            assert result.grad_norm == (torch.inf if step == OVERFLOW else pytest.approx(norm, rel=1e-3))


def test_checkpoints_hold_the_scale_and_the_counters(folders: dict[str, Path], tmp_path: Path) -> None:
    """Saved after an overflow at tp2 pp2, resumed at dp2 ZeRO 2: as the run that was never broken."""
    source, target = LAYOUTS[1][0], Layout(dp=2, zero=2, precision="fp16", extra=EXTRA)
    folder, steps = str(folders["qwen3"]), list(range(STEPS))
    begun = run_ranks(4, _train, source, folder, steps[: OVERFLOW + 1], 0, str(tmp_path))
    ended = run_ranks(2, _train, target, folder, steps[OVERFLOW + 1 :], -1, None, str(tmp_path))
    want = reference(steps)[OVERFLOW + 1 :]
    assert begun[0][1]["cur_scale"] == 2.0**15 and begun[0][1]["last_overflow_iter"] == OVERFLOW
    for results, counters in ended:
        assert counters == {
            **begun[0][1], "step": STEPS, "cur_iter": STEPS, "skipped": 1,
        }  # fmt: skip
        assert [r.lr for r in results] == pytest.approx([lr for _, _, lr in want], rel=1e-12)
        assert [r.loss for r in results] == pytest.approx([loss for loss, _, _ in want], rel=4e-4)
        assert {r.loss_scale for r in results} == {2.0**15}


def _state(scaler: Any) -> OptimizerState:
    return OptimizerState(SimpleNamespace(optimizer=None, loss_scaler=scaler), SimpleNamespace())  # type: ignore[arg-type]


def test_a_resumed_run_keeps_its_own_window_and_a_constant_scale() -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

    old = DynamicLossScaler(2.0**16, 1000, 1, 2, False)
    old.cur_scale, old.cur_iter, old.last_overflow_iter, old.cur_hysteresis = 256.0, 40, 33, 1
    numbers = _state(old).loss_scaler()
    new = DynamicLossScaler(2.0**10, 500, 4, 3, True)
    _state(new).set_loss_scaler(numbers)
    assert (new.cur_scale, new.cur_iter, new.last_overflow_iter, new.cur_hysteresis) == (256.0, 40, 33, 1)
    assert (new.scale_window, new.min_scale, new.delayed_shift, new.consecutive_hysteresis) == (500, 4, 3, True)
    constant = LossScaler(64.0)
    _state(constant).set_loss_scaler(numbers)
    assert constant.cur_scale == 64.0 and _state(constant).loss_scaler() == {}


def _result(**changed: Any) -> StepResult:
    numbers: dict[str, Any] = {
        "step": 3, "loss": 2.0, "valid_tokens": 9, "tokens": 9, "step_time_s": 1.0, "peak_memory_bytes": 1,
        "rows_seen": (), "grad_norm": float("inf"), "lr": 0.1, "skipped": True, "loss_scale": 1024.0,
    }  # fmt: skip
    return StepResult(**numbers | changed)


def test_the_scale_is_reported() -> None:
    assert step_record(_result())["loss_scale"] == 1024.0 and "scale 1024" in step_line(_result(), 10, None)
    plain = _result(loss_scale=None, skipped=False)
    assert "loss_scale" not in step_record(plain) and "scale" not in step_line(plain, 10, None)


@pytest.mark.parametrize(
    "precision,scale,ends",
    [
        (PrecisionPlan("fp16", min_loss_scale=0.25), 2.0, False),
        (PrecisionPlan("fp16", min_loss_scale=0.25), 1.0, True),  # DeepSpeed's least is 1
        (PrecisionPlan("fp16", min_loss_scale=64.0), 64.0, True),
        (PrecisionPlan("fp16", loss_scale=1.0), 1.0, False),  # constant: nothing to adapt, the batch is skipped
        (PrecisionPlan("fp32"), None, True),
    ],
)
def test_overflows_at_the_smallest_scale_end_the_run(precision: PrecisionPlan, scale: float | None, ends: bool) -> None:
    run: Any = SimpleNamespace(
        _metrics=None, _track=lambda *args: None, saver=SimpleNamespace(last_good="the start"), _skipped=0,
        runner=SimpleNamespace(on_nonfinite="stop"),
        engine=SimpleNamespace(plan=SimpleNamespace(precision=precision), critic=None),
    )  # fmt: skip
    fine = _result(loss=1.0, grad_norm=1.0, loss_scale=None, skipped=False)
    actor = SimpleNamespace(plan=SimpleNamespace(precision=PrecisionPlan("fp32")), critic=run.engine)
    for result, engine, whose in (
        (_result(loss_scale=scale), run.engine, "actor"),
        (replace(fine, critic=_result(loss_scale=scale)), actor, "critic"),
    ):  # fmt: skip
        run.engine = engine
        if ends:
            with pytest.raises(TrainingError, match=f"gradient norm inf.*{whose}.optim.lr"):
                Trainer._log(run, result)
        else:
            Trainer._log(run, result)
