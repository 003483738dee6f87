"""Steps whose numbers are not finite: all ranks skip them together, nothing changes, and what went wrong is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid5d.engine.deepspeed.optimizer_state import OptimizerState
from tests.engine_kit import Layout, build_engine
from tests.harness import run_ranks
from tests.kit import Recipe, make_rows, step_batch

CLIP = 0.9
EXTRA = {"lr_sched": {"lr_decay_style": "constant", "lr_warmup_iters": 6}}
BATCH, BAD = 8, 2  # the step with this index is not finite


def bits(engine: Any) -> dict[str, list[int]]:
    """Weights, masters, moments and Adam's t of this rank, as raw bytes."""
    state = OptimizerState(engine.ds.optimizer, engine.ctx.dp_cp)
    # ZeRO 3 lets go of whole parameters in a step that it skips
    tensors = {f"p{i}": getattr(p, "ds_tensor", p) for i, p in enumerate(engine.module.parameters())}
    tensors |= {f"master{i}": flat for i, flat in enumerate(state.flats)}
    moments = {
        f"{key}{i}": value for i, flat in enumerate(state.flats) for key, value in state.base.state[flat].items()
        if isinstance(value, Tensor)
    }  # fmt: skip
    assert len(moments) >= 2, "Adam has taken a step"
    tensors |= moments
    return {n: x.detach().contiguous().reshape(-1).view(torch.uint8).tolist() for n, x in tensors.items()} | {
        "t": [state.step()], "random": torch.get_rng_state().tolist(),
    }  # fmt: skip


def _plant(engine: Any, where: str, active: list[bool]) -> None:
    """Make one tensor of this rank infinite whenever `active` says so."""
    if where == "gradient":
        vectors = [p for p in engine.module.parameters() if len(getattr(p, "ds_shape", p.shape)) == 1]
        first = next(p for p in vectors if p.requires_grad)
        first.register_hook(lambda g: torch.full_like(g, torch.inf) if active[0] else g)
    else:
        layer = [m for m in engine.module.modules() if type(m).__name__ == "FeedForward"][-1].down
        layer.register_forward_hook(lambda m, a, out: out * torch.inf if active[0] and m.training else None)


def _train(rank: int, layout: Layout, folder: str, bad: int, where: str, clip: float) -> tuple[list[Any], bool, bool]:
    """Train past a step that is not finite on rank `bad`, and without that step: results, what it changed, the end."""
    found = []
    for broken in (True, False):
        recipe, active = Recipe(optimizer="adamw", lr=0.05, clip=clip), [False]
        engine = build_engine(layout, recipe, folder, BATCH)
        if broken and rank == bad:
            _plant(engine, where, active)
        results = []
        for step in range(4):
            if step == BAD and not broken:
                continue
            before = bits(engine) if step == BAD else {}
            active[0] = step == BAD
            rows = make_rows(BATCH, 24, 101, seed=step + 1)
            results.append(engine.train_batch(step_batch(rows, layout.dp, engine.ctx.dp.rank, layout.micro)))
            if step == BAD:
                now = bits(engine)
                unchanged = [k for k in now if now[k] != before[k]]
        found.append((results, bits(engine)))
    (results, end), (others, expected) = found
    assert [r.lr for r in results if not r.skipped] == [r.lr for r in others], "the schedule stood still"
    return results, unchanged, end == expected


CASES = [
    (Layout(tp=2, sp=True, extra=EXTRA), 1, "gradient", CLIP),
    (Layout(tp=2, extra=EXTRA), 1, "gradient", 0.0),  # of a copy that the norm does not count
    (Layout(pp=2, precision="bf16", extra=EXTRA), 0, "gradient", CLIP),
    (Layout(pp=2, extra=EXTRA), 1, "output", CLIP),
    (Layout(dp=2, zero=2, precision="bf16", extra=EXTRA), 1, "gradient", 0.0),
    (Layout(dp=2, zero=3, extra=EXTRA), 1, "output", 0.0),
    (Layout(cp=2, zero=3, precision="bf16", extra=EXTRA), 1, "gradient", CLIP),
]


@pytest.mark.parametrize(
    "layout,bad,where,clip",
    [pytest.param(*c, id=str(i), marks=[pytest.mark.full] if i in (0, 3, 6) else []) for i, c in enumerate(CASES)],
)
def test_a_step_that_is_not_finite_changes_nothing_and_is_named(
    layout: Layout, bad: int, where: str, clip: float, folders: dict[str, Path]
) -> None:
    """On one rank only; afterwards the run is bitwise the one that never had that step."""
    found = run_ranks(2, _train, layout, str(folders["qwen3"]), bad, where, clip, timeout=240)
    for results, unchanged, same in found:
        assert [r.skipped for r in results] == [s == BAD for s in range(4)]
        assert [r.skipped_steps for r in results] == [0, 0, 1, 1] and [r.step for r in results] == [1, 2, 3, 4]
        assert not unchanged and same, unchanged
        origin = results[BAD].origin
        micro = f"rank {bad}, micro-batch 1 of {BATCH // layout.dp // layout.micro} (rows "
        assert origin.startswith(micro) and origin.endswith(" is not finite"), origin
        tensor = origin.partition("): ")[2].removesuffix(" is not finite")
        if where == "output":
            assert tensor == "output of model.layers.3.mlp.down_proj"
        else:
            assert tensor == "gradient of model.layers.0.input_layernorm.weight"
        assert all(r.origin is None for r in results if not r.skipped)
