"""`hybrid5d train --elastic`: the layout nearest to the YAML's that the processes left can form. Pure.

The global batch, the model, the schedule of the learning rate and the precision stay, so that the rows of each step,
its loss and its weights are those of the unbroken run; degrees, micro-batch size and accumulation change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from hybrid5d.config.schema import RunConfig
from hybrid5d.errors import ConfigError
from hybrid5d.plan.hardware import Hardware
from hybrid5d.plan.job import job_of
from hybrid5d.plan.memory import stage_memory
from hybrid5d.plan.run import RunPlan, examine
from hybrid5d.plan.search import changed

_MODEL = "actor.model."
_TP, _PP, _CP = (f"{_MODEL}{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context"))
_OF_THE_PIPELINE = {  # keys that fit one pp degree only, with what stands for "any"
    f"{_MODEL}pipeline_schedule": None,
    f"{_MODEL}virtual_pipeline_model_parallel_size": None,
    f"{_MODEL}pipeline_warmup": "plain",
    f"{_MODEL}decoder_first_pipeline_num_layers": None,
    f"{_MODEL}decoder_last_pipeline_num_layers": None,
}


@dataclass(frozen=True)
class Elastic:
    """A layout for the processes that are there.

    Attributes:
        keys: what of the YAML it changes, by key; empty where the YAML's own layout fits.
        plan: the run's plan with them.
        idle: processes that no layout can use.
    """

    keys: dict[str, Any]
    plan: RunPlan
    idle: int

    def overrides(self) -> tuple[str, ...]:
        """The keys as words of a command line."""
        return tuple(f"{key}={'null' if value is None else str(value).lower()}" for key, value in self.keys.items())

    def text(self) -> str:
        """One line for the user."""
        plan, lay, batch = self.plan, self.plan.layout, self.plan.batch
        shape = f"tp {lay.tp}{' + sp' if plan.sequence_parallel else ''} x cp {lay.cp} x dp {lay.dp} x pp {lay.pp}"
        changes = ", ".join(self.overrides()) or "the YAML's own degrees"
        micro = f"{batch.gradient_accumulation_steps} micro-batches of {batch.micro_batch_size} per dp rank"
        idle = f"; {self.idle} of {lay.world_size + self.idle} processes stay idle" if self.idle else ""
        rows = f"{batch.global_batch_size} rows a step as before"
        return f"elastic: {lay.world_size} processes, {shape} ({changes}), {rows}, {micro}{idle}"


def nearest(config: RunConfig, processes: int, hardware: Hardware | None = None) -> Elastic | list[ConfigError]:
    """The layout to take on `processes` processes, or why the YAML's own fails where none is legal.

    tp, pp and cp stay where at least one replica of the model has its processes: dp shrinks or grows, and what a dp
    that cuts the batch leaves over idles. Else as many processes as any legal layout uses; of those layouts the one
    that changes the fewest of tp, pp and cp, then the one whose degrees are nearest (sum of |log ratios|).

    Args:
        hardware: where it is known, layouts whose ranks do not fit its memory are left out.
    """
    first: list[ConfigError] = []
    legal = 0
    for keep, world in product((True, False), range(processes, 0, -1)):
        for keys in _candidates(config, world, keep):
            plan, errors = examine(changed(config, keys), world, "train")
            if plan is not None and not errors:
                legal += 1
                if _fits(plan, hardware):
                    return Elastic({k: v for k, v in keys.items() if _differs(config, k, v)}, plan, processes - world)
            first = first or errors
    if not legal:
        return first
    rule = f"none of {legal} legal layouts of so many processes fits the memory"
    return [ConfigError("--elastic", processes, rule, "use more processes, or recompute activations")]


def _differs(config: RunConfig, key: str, value: Any) -> bool:
    node: Any = config
    for name in key.split("."):
        node = getattr(node, name)
    return bool(node != value)


def _candidates(config: RunConfig, world: int, keep: bool) -> Iterator[dict[str, Any]]:
    """Keys of each layout that fills `world` processes, nearest first; only the YAML's own degrees where they are kept.

    Where pp changes, the YAML's schedule and stages are tried first, then the default ones.
    """
    model, rows = config.actor.model, config.actor.global_batch_size
    old = (
        model.tensor_model_parallel_size, model.pipeline_model_parallel_size, model.context_parallel_size,
    )  # fmt: skip
    shapes = [
        (tp, pp, cp) for tp in _divisors(world) for pp in _divisors(world // tp) for cp in _divisors(world // tp // pp)
    ]
    for tp, pp, cp in sorted((s for s in shapes if not keep or s == old), key=lambda new: _distance(old, new)):
        degrees: dict[str, Any] = {_TP: tp, _PP: pp, _CP: cp}
        if tp == 1 and model.sequence_parallel:
            degrees[f"{_MODEL}sequence_parallel"] = False
        if cp != old[2] and model.hierarchical_context_parallel_sizes is not None:
            degrees[f"{_MODEL}hierarchical_context_parallel_sizes"] = None
        micro = _micro(config.actor.micro_batch_size, rows, world // (tp * pp * cp))
        if micro is None:
            continue
        degrees["actor.micro_batch_size"] = micro
        yield degrees
        if pp != old[1]:
            yield {**degrees, **_OF_THE_PIPELINE}


def _micro(asked: int, rows: int | None, dp: int) -> int | None:
    """The largest micro-batch up to the asked one that cuts a dp rank's rows; None: dp does not cut the batch."""
    if rows is None:
        return asked
    if rows % dp:
        return None
    return next(m for m in range(min(asked, rows // dp), 0, -1) if rows // dp % m == 0)


def _distance(old: tuple[int, int, int], new: tuple[int, int, int]) -> tuple[Any, ...]:
    tp, pp, cp = (abs(math.log(n / o)) for o, n in zip(old, new))
    return sum(x > 0 for x in (tp, pp, cp)), round(tp + pp + cp, 9), tp, cp, new


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _fits(plan: RunPlan, hardware: Hardware | None) -> bool:
    job = None if hardware is None else job_of(plan, 8)
    if job is None or hardware is None:
        return True
    limit = hardware.memory_bytes * (1 - hardware.headroom)
    return all(stage_memory(job, rank, hardware).driver <= limit for rank in range(plan.layout.pp))
