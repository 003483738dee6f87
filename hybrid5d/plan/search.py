"""All legal layouts of a run on N ranks that fit the machine, best first, and why the others fail or lose. Pure.

Degrees, schedule, micro-batch, recomputation, sequence parallelism and ZeRO stage vary; the global batch, the model and
the precision stay. Candidates are priced as `hybrid5d plan` prices a run; a candidate's rules are those of `examine`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from hybrid5d.config.schema import RunConfig
from hybrid5d.config.tree import put
from hybrid5d.plan.hardware import Hardware
from hybrid5d.plan.job import Job
from hybrid5d.plan.layout import ParallelLayout
from hybrid5d.plan.memory import stage_memory
from hybrid5d.plan.pipeline import Schedule
from hybrid5d.plan.run import RecomputePlan, examine
from hybrid5d.plan.sequence_rules import check_heads, default_ulysses
from hybrid5d.plan.stages import split_layers
from hybrid5d.plan.tensors import tp_faults
from hybrid5d.plan.timing import step_time

RECOMPUTE = (RecomputePlan(), RecomputePlan("selective"), RecomputePlan("full", "uniform", 1))
_MODEL = "actor.model."
_ZERO = "actor.deepspeed.zero_optimization.stage"


@dataclass(frozen=True)
class Candidate:
    """One layout with its price. `driver`: the fullest card's reading, bytes."""

    job: Job
    seconds: float
    driver: int

    def keys(self) -> dict[str, Any]:
        """What of the YAML it sets."""
        job, lay = self.job, self.job.layout
        return {
            f"{_MODEL}tensor_model_parallel_size": lay.tp,
            f"{_MODEL}pipeline_model_parallel_size": lay.pp,
            f"{_MODEL}context_parallel_size": lay.cp,
            f"{_MODEL}sequence_parallel": job.sp,
            f"{_MODEL}recompute_granularity": job.recompute.granularity,
            f"{_MODEL}recompute_method": job.recompute.method,
            f"{_MODEL}recompute_num_layers": job.recompute.num_layers,
            f"{_MODEL}pipeline_schedule": job.schedule.kind,
            f"{_MODEL}virtual_pipeline_model_parallel_size": job.schedule.chunks if job.schedule.chunks > 1 else None,
            f"{_MODEL}pipeline_warmup": "plain",
            f"{_MODEL}pipeline_partition": "uniform",
            f"{_MODEL}decoder_first_pipeline_num_layers": None,
            f"{_MODEL}decoder_last_pipeline_num_layers": None,
            f"{_MODEL}hierarchical_context_parallel_sizes": None,
            "actor.micro_batch_size": job.micro_batch,
            "actor.global_batch_size": lay.dp * job.micro_batch * job.micro_batches,
            _ZERO: job.zero,
        }

    def to_dict(self) -> dict[str, Any]:
        """As JSON shows it."""
        lay = self.job.layout
        return {
            "tp": lay.tp, "pp": lay.pp, "cp": lay.cp, "dp": lay.dp, "sp": self.job.sp, "zero": self.job.zero,
            "schedule": self.job.schedule.kind, "chunks": self.job.schedule.chunks,
            "micro_batch": self.job.micro_batch, "recompute": self.job.recompute.granularity or "none",
            "seconds": self.seconds, "driver_bytes": self.driver,
        }  # fmt: skip


@dataclass
class Found:
    """What a search gives. `reasons`: why layouts are out, with how many of each; `tried`: priced ones."""

    best: list[Candidate] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    tried: int = 0
    fitting: int = 0
    loses: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As JSON shows it: `loses` says by how much and in which part a layout is behind the first."""
        rows = [c.to_dict() | {"loses": why} for c, why in zip(self.best, self.loses)]
        return {"priced": self.tried, "fitting": self.fitting, "best": rows, "failed": dict(self.reasons.most_common())}

    def text(self) -> str:
        """Plain lines."""
        lines = [f"searched  {self.tried} layouts priced, {self.fitting} fit"]
        for i, (c, why) in enumerate(zip(self.best, self.loses), 1):
            row = c.to_dict()
            shape = " ".join(f"{k} {row[k]}" for k in ("tp", "pp", "cp", "dp", "zero", "micro_batch", "recompute"))
            if row["pp"] > 1:
                shape += f" {row['schedule']}" + (f" of {row['chunks']} runs" if row["chunks"] > 1 else "")
            lines.append(
                f"  {i:<3} {c.seconds:.4g} s, {c.driver / 2**30:.1f} GiB: {shape}{' sp' if row['sp'] else ''}  {why}"
            )
        return "\n".join([*lines, *(f"failed    {n}: {why}" for why, n in self.reasons.most_common())]) + "\n"


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def degrees(job: Job, world: int, result: Found) -> Iterator[ParallelLayout]:
    """Every (tp, pp, cp, dp) that fills the world and can cut this model; the others go to `result.reasons`."""
    spec = job.spec
    for tp in _divisors(world):
        if tp_faults(tp, spec.num_attention_heads, spec.num_key_value_heads, spec.intermediate_size):
            result.reasons["tp does not cut heads or MLP width"] += 1
            continue
        if tp > job.node:
            result.reasons["tensor-parallel groups would span nodes"] += 1
            continue
        for pp in _divisors(world // tp):
            if pp > spec.num_layers:
                result.reasons["more pipeline stages than layers"] += 1
                continue
            for cp in _divisors(world // tp // pp):
                if job.cp_method == "a2a+p2p":
                    ulysses = default_ulysses(spec.num_key_value_heads, tp, cp, job.node)
                else:
                    ulysses = None
                if check_heads(spec.num_attention_heads, spec.num_key_value_heads, tp, cp, job.cp_method, ulysses):
                    result.reasons["cp does not cut the heads (Ulysses)"] += 1
                elif cp > 1 and job.seq // cp < 2 * tp:
                    result.reasons["a row is too short for cp"] += 1
                else:
                    yield ParallelLayout(pp=pp, dp=world // tp // pp // cp, cp=cp, tp=tp)


def _pipelines(layers: int, pp: int) -> Iterator[tuple[Schedule, tuple[int, ...]]]:
    """Schedules and layers per stage. Not gpipe nor the wide warm-up: 1f1b is priced as fast and keeps less."""
    kinds = [Schedule("1f1b", pp)]
    if pp > 1:
        kinds += [Schedule("zb-h1", pp), Schedule("zbv", pp, 2), *(Schedule("interleaved", pp, v) for v in (2, 4))]
    for schedule in kinds:
        if schedule.stages <= max(layers, pp):
            yield schedule, split_layers(layers, schedule.stages)


def _variants(base: Job, layout: ParallelLayout, rows: int, result: Found) -> Iterator[Job]:
    """Schedules, micro-batches and ZeRO stages of one layout, without recomputation, with SP wherever tp is."""
    per_rank, left = divmod(rows, layout.dp)
    if left or not per_rank:
        result.reasons["the global batch does not divide over dp"] += 1
        return
    pipelines = list(_pipelines(base.spec.num_layers, layout.pp))
    for micro in (m for m in (1, 2, 4, 8, 16) if per_rank % m == 0):
        for zero, (schedule, stages) in product((1, 2, 3) if layout.pp == 1 else (1,), pipelines):
            yield replace(
                base, layout=layout, stages=stages, schedule=schedule, micro_batch=micro,
                micro_batches=per_rank // micro, zero=zero, sp=layout.tp > 1, node=min(base.node, layout.world_size),
                ulysses=default_ulysses(base.spec.num_key_value_heads, layout.tp, layout.cp, base.node)
                if base.cp_method == "a2a+p2p"
                else 1,
            )  # fmt: skip


def search(base: Job, world: int, rows: int, hardware: Hardware, keep: int = 40) -> Found:
    """Price every layout; `rows`: the global batch.

    Sequence parallelism is taken with every tp above 1 (it divides more memory at equal bytes on the wire); of the
    recomputations the first that fits is the fastest, so the later ones are not priced.
    """
    result, fitting = Found(), list[Candidate]()
    limit = hardware.memory_bytes * (1 - hardware.headroom)
    for layout in degrees(base, world, result):
        for job in _variants(base, layout, rows, result):
            for recompute in RECOMPUTE:
                tried = replace(job, recompute=recompute)
                result.tried += 1
                driver = _fullest(tried, hardware)
                if driver <= limit:
                    fitting.append(Candidate(tried, step_time(tried, hardware).total, driver))
                    break
            else:
                result.reasons["does not fit the memory, with full recomputation neither"] += 1
    fitting.sort(key=lambda c: (c.seconds, c.driver))
    result.fitting, result.best = len(fitting), fitting[:keep]
    return result


def _fullest(job: Job, hardware: Hardware) -> int:
    """The fullest card's reading: one of the first two stages or the last, as layers in between are alike."""
    ranks = {0, min(1, job.layout.pp - 1), job.layout.pp - 1}
    return max(stage_memory(job, r, hardware).driver for r in ranks)


def why_slower(first: Candidate, other: Candidate, hardware: Hardware) -> str:
    """By how much, and the part of the step that costs it most; the first by how much its card is full."""
    if other is first:
        return f"best; {first.driver / hardware.memory_bytes:.0%} of the card"
    a, b = step_time(first.job, hardware).parts, step_time(other.job, hardware).parts
    part = max(a, key=lambda name: b[name] - a[name])
    return (
        f"{other.seconds / first.seconds - 1:.1%} slower: {part.replace('_', ' ')} {b[part]:.3g} s for {a[part]:.3g} s"
    )


def changed(config: RunConfig, keys: dict[str, Any]) -> RunConfig:
    """The config with a candidate's keys."""
    tree = config.to_tree()
    for path, value in keys.items():
        put(tree, path, value)
    return RunConfig.model_validate(tree)


def with_reasons(config: RunConfig, result: Found, world: int, hardware: Hardware, keep: int = 10) -> Found:
    """What a run's own rules accept of the best, with why each loses; what the others break goes to the reasons."""
    kept = list[Candidate]()
    for candidate in result.best:
        if len(kept) == keep:
            break
        _, errors = examine(changed(config, candidate.keys()), world)
        if errors:
            result.reasons[f"{errors[0].key}: {errors[0].rule}"] += 1
        else:
            kept.append(candidate)
    result.best = kept
    result.loses = [why_slower(kept[0], c, hardware) for c in kept]
    return result
