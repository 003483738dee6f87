"""Run the engine of a layout on N ranks and put its shards together by HF name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hybrid5d.check.compare import compare as comparison
from hybrid5d.check.observe import RankRun, Shards, joined, train
from hybrid5d.check.observe import assemble as join
from hybrid5d.check.observe import shards as shards
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


def assemble(all_shards: list[Shards]) -> dict[str, np.ndarray]:
    """Full tensors by HF name; copies of one run must be bitwise equal, and no element NaN."""
    full, differ = join(all_shards)
    assert not differ, f"copies differ: {differ}"
    assert not (nan := _with_nan(full)), f"NaN in {nan}"
    return full


@dataclass(frozen=True)
class Job:
    """One training run of a layout: which model folder, which optimizer, which rows."""

    folder: str
    recipe: Recipe
    steps: list[list[Any]] = field(hash=False)


def _train_rank(rank: int, runs: list[tuple[Layout, Job]]) -> list[RankRun]:
    return [_train_job(layout, job) for layout, job in runs]


def _train_job(layout: Layout, job: Job) -> RankRun:
    engine = build_engine(layout, job.recipe, job.folder, len(job.steps[0]))
    return train(engine, [step_batch(rows, layout.dp, engine.ctx.dp.rank, layout.micro) for rows in job.steps])


def train_layout(layout: Layout, jobs: list[Job], timeout: float = 240, backend: str | None = None) -> list[Trace]:
    """Train each job on all ranks of a layout; every rank must report the same numbers and hold the same copies."""
    return train_runs([(layout, job) for job in jobs], timeout, backend)


def train_runs(runs: list[tuple[Layout, Job]], timeout: float = 240, backend: str | None = None) -> list[Trace]:
    """`train_layout` for several layouts of one world size, one after the other in the same processes."""
    (world,) = {layout.world for layout, _ in runs}
    ranks = run_ranks(world, _train_rank, runs, timeout=timeout, backend=backend)
    traces = [joined(per_rank) for per_rank in zip(*ranks)]
    for trace in traces:
        assert not trace.copies, f"copies differ: {trace.copies}"
        assert not (nan := _with_nan({**trace.weights, **trace.grads})), f"NaN in {nan}"
    return traces


def _with_nan(tensors: dict[str, np.ndarray]) -> list[str]:
    return [name for name, tensor in tensors.items() if np.isnan(tensor).any()]


def compare(got: Trace, want: Trace, precision: str = "fp32", **changed: float) -> None:
    """Fail with what is outside its bound."""
    faults = comparison(got, want, precision, **changed).faults
    assert not faults, "; ".join(faults)
