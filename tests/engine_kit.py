"""Run the engine of a layout on N ranks and put its shards together by HF name."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from hybrid5d.parallel.shard import Piece, pieces_of
from tests.harness import run_ranks
from tests.kit import Recipe, Trace, step_batch


@dataclass(frozen=True)
class Layout:
    """A layout and everything that may be switched with it."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    sp: bool = False
    micro: int = 1
    zero: int = 1
    precision: str = "fp32"
    model: dict[str, Any] = field(default_factory=dict, hash=False)  # more keys of actor.model
    extra: dict[str, Any] = field(default_factory=dict, hash=False)  # more keys of actor
    packing: str = "none"

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def __str__(self) -> str:
        parts = [f"{a}{getattr(self, a)}" for a in ("tp", "pp", "cp", "dp") if getattr(self, a) > 1]
        parts += ["sp"] if self.sp else []
        parts += [f"mbs{self.micro}"] if self.micro > 1 else []
        parts += [f"zero{self.zero}"] if self.zero != 1 else []
        parts += [self.precision] if self.precision != "fp32" else []
        parts += ["packed"] if self.packing != "none" else []
        parts += [f"{k}={v}" for k, v in {**self.model, **self.extra}.items()]
        return "-".join(parts) or "one"


def config_dict(layout: Layout, recipe: Recipe, folder: str, global_batch: int) -> dict[str, Any]:
    """The YAML of a test run."""
    optim: dict[str, Any] = {"optimizer": recipe.optimizer, "lr": recipe.lr, "clip_grad": recipe.clip}
    if recipe.optimizer == "sgd":
        optim.update(sgd_momentum=0.0, weight_decay=0.0)
    else:
        optim.update(adam_beta1=0.9, adam_beta2=0.95, adam_eps=recipe.eps, weight_decay=recipe.weight_decay)
    optim["use_distributed_optimizer"] = layout.zero != 0
    actor: dict[str, Any] = {
        "training_backend": "deepspeed",
        "micro_batch_size": layout.micro,
        "global_batch_size": global_batch,
        "model": {
            "model_path": folder,
            "load_weights": True,
            "precision": layout.precision,
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "context_parallel_size": layout.cp,
            "sequence_parallel": layout.sp,
            **layout.model,
        },
        "optim": optim,
        "lr_sched": {"lr_decay_style": "constant"},
    }
    if layout.zero > 1:
        actor["deepspeed"] = {"zero_optimization": {"stage": layout.zero}}
    optim.update(layout.extra.get("optim", {}))
    actor.update({k: v for k, v in layout.extra.items() if k != "optim"})
    data = {"type": "tokens", "packing": layout.packing}
    return {"runner": {"task_type": "sft", "max_steps": recipe.steps}, "data": data, "actor": actor}


def build_engine(layout: Layout, recipe: Recipe, folder: str, global_batch: int) -> Any:
    """An Engine on this rank; the group exists already."""
    from hybrid5d.config.schema import RunConfig
    from hybrid5d.engine.build import initialize
    from hybrid5d.plan.run import build_plan

    config = RunConfig.model_validate(config_dict(layout, recipe, folder, global_batch))
    return initialize(build_plan(config, layout.world, "translate"))


Shards = list[tuple[Piece, np.ndarray]]


def shards(module: torch.nn.Module, value: Any) -> Shards:
    """(piece, local values) of every parameter; `value(param)` may be None (no gradient)."""
    found = []
    for param in module.parameters():
        if not pieces_of(param):
            continue
        x = value(param)
        for piece in pieces_of(param):
            if x is not None:
                found.append(
                    (
                        piece,
                        piece.local_view(x.detach().float().cpu().view(getattr(param, "ds_shape", param.shape)))
                        .numpy()
                        .copy(),
                    )
                )
    return found


def assemble(all_shards: list[Shards]) -> dict[str, np.ndarray]:
    """Full tensors by HF name; copies of one run must be bitwise equal, and every element must be covered."""
    full: dict[str, np.ndarray] = {}
    for rank_shards in all_shards:
        for piece, values in rank_shards:
            target = full.setdefault(piece.name, np.full(piece.full_shape, np.nan, np.float32))
            place = piece.cut.slices(piece.full_shape)
            old = target[place]
            if not np.isnan(old).all():
                assert np.array_equal(old, values), f"copies of {piece.name} differ by {np.abs(old - values).max()}"
            target[place] = values
    for name, tensor in full.items():
        assert not np.isnan(tensor).any(), f"{name}: parts held by no rank, or NaN"
    return full


@dataclass(frozen=True)
class Job:
    """One training run of a layout: which model folder, which optimizer, which rows."""

    folder: str
    recipe: Recipe
    steps: list[list[Any]] = field(hash=False)


def _train_rank(rank: int, layout: Layout, jobs: list[Job]) -> list[dict[str, Any]]:
    return [_train_job(layout, job) for job in jobs]


def _train_job(layout: Layout, job: Job) -> dict[str, Any]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    engine = build_engine(layout, job.recipe, job.folder, len(job.steps[0]))
    first: Shards = []
    take_step = engine.ds._take_model_step

    def spy(*args: Any, **kwargs: Any) -> Any:
        if not first:
            first.extend(shards(engine.module, lambda p: safe_get_full_grad(p) if p.requires_grad else None))
        return take_step(*args, **kwargs)

    engine.ds._take_model_step = spy
    results = [engine.train_batch(step_batch(rows, layout.dp, engine.ctx.dp.rank, layout.micro)) for rows in job.steps]

    def master(p: torch.nn.Parameter) -> torch.Tensor:
        if (layout.precision == "fp32" and layout.zero < 3) or not p.requires_grad:
            return p
        full = safe_get_full_fp32_param(p)
        return p if full is None else full

    return {"results": results, "grads": first, "weights": shards(engine.module, master)}


def train_layout(layout: Layout, jobs: list[Job], timeout: float = 240, backend: str | None = None) -> list[Trace]:
    """Train each job on all ranks of a layout; every rank must report the same numbers."""
    ranks = run_ranks(layout.world, _train_rank, layout, jobs, timeout=timeout, backend=backend)
    traces = []
    for per_rank in zip(*ranks):
        first = per_rank[0]["results"]
        for r in per_rank[1:]:
            assert [(x.loss, x.grad_norm, x.valid_tokens) for x in r["results"]] == [
                (x.loss, x.grad_norm, x.valid_tokens) for x in first
            ], "ranks disagree on loss or norm"
        losses, norms = [x.loss for x in first], [x.grad_norm for x in first]
        grads, weights = assemble([r["grads"] for r in per_rank]), assemble([r["weights"] for r in per_rank])
        traces.append(Trace(losses, norms, grads, weights))
    return traces


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """||a - b|| / ||b||, or ||a|| where b is zero."""
    scale = float(np.linalg.norm(b))
    return float(np.linalg.norm(a - b)) / (scale if scale > 0 else 1.0)


@dataclass(frozen=True)
class Bounds:
    """How far a run may be from one process: losses and weights absolutely, norms and each gradient relatively."""

    loss: float
    norm: float
    grad: float
    weight: float


# fp32 differs by the order of sums. bf16 rounds start weights, activations and gradients to 8 significant bits: a norm
# weight near 1 starts up to 2^-8 away. The largest seen: loss 2e-3, norm 4e-3, weight
# 4e-3 among the pairs; the largest gradient
# error among the triples 8e-2 (a key bias, whose gradient is nearly nothing).
BOUNDS = {"fp32": Bounds(1e-5, 1e-5, 1e-5, 1e-5), "bf16": Bounds(5e-3, 1e-2, 1e-1, 6e-3)}


def compare(got: Trace, want: Trace, precision: str = "fp32", **changed: float) -> None:
    """Loss of each step, norm, every first gradient and every last weight; what is off is named, worst first."""
    bounds = replace(BOUNDS[precision], **changed)
    np.testing.assert_allclose(got.losses, want.losses, atol=bounds.loss, rtol=0, err_msg="loss")
    np.testing.assert_allclose(got.norms, want.norms, rtol=bounds.norm, atol=1e-7, err_msg="grad norm")
    assert got.weights.keys() == want.weights.keys()
    wrong = {n: relative(got.grads[n], g) for n, g in want.grads.items()}
    assert max(wrong.values()) <= bounds.grad, f"first gradients off: {_worst(wrong, bounds.grad)}"
    far = {n: float(np.abs(got.weights[n] - w).max()) for n, w in want.weights.items()}
    assert max(far.values()) <= bounds.weight, f"weights off: {_worst(far, bounds.weight)}"


def _worst(errors: dict[str, float], bound: float) -> dict[str, float]:
    return {n: e for n, e in sorted(errors.items(), key=lambda item: -item[1]) if not e <= bound}
