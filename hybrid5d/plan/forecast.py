"""What a plan amounts to before anything runs: groups, parameters, memory, traffic, FLOPs, bubble, seconds. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from hybrid5d.plan.flops import Flops, flops
from hybrid5d.plan.hardware import Hardware
from hybrid5d.plan.job import Job, job_of, played
from hybrid5d.plan.layout import AXES
from hybrid5d.plan.memory import StageMemory, groups_of, host_at_load, stage_memory
from hybrid5d.plan.outputs import layout_summary
from hybrid5d.plan.run import RunPlan
from hybrid5d.plan.timing import StepTime, of_measured, step_time
from hybrid5d.plan.traffic import stage_traffic

MAX_BUBBLE = 0.2  # a warning above
NEAR_FULL = 0.9  # of a card


@dataclass(frozen=True)
class AxisGroups:
    """The groups of one axis: how many ranks in each, how many groups, and how many of them span nodes."""

    size: int
    count: int
    across_nodes: int


@dataclass(frozen=True)
class StageForecast:
    """What one pipeline rank holds.

    Attributes:
        decoder_layers: of all its runs of layers; runs: of each of them.
        parameters: of one tp rank, vocabulary padding included; None: the model is unknown.
    """

    stage: int
    decoder_layers: int
    runs: tuple[int, ...]
    parameters: int | None


@dataclass(frozen=True)
class ScheduleForecast:
    """The step's program at unit costs F = B = W = 1, as `plan.pipeline.Timeline` defines each; by pp rank."""

    name: str
    chunks: int
    makespan_units: float
    bubble: float
    live_chunks: tuple[int, ...]
    idle_inside: tuple[float, ...]


@dataclass(frozen=True)
class Prices:
    """What is known only with the model's sizes and the row length."""

    job: Job
    memory: tuple[StageMemory, ...]
    traffic: tuple[dict[str, dict[str, int]], ...]
    flops: Flops
    time: StepTime


@dataclass(frozen=True)
class Forecast:
    """Everything that `hybrid5d plan` says. `prices` is None where the model's sizes are not known."""

    plan: RunPlan
    hardware: Hardware
    gpus_per_node: int
    groups: dict[str, AxisGroups]
    stages: tuple[StageForecast, ...]
    schedule: ScheduleForecast
    prices: Prices | None
    warnings: tuple[str, ...]
    measured: dict[str, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The object that `--format json` prints."""
        batch, config, prices = asdict(self.plan.batch), self.plan.deepspeed, self.prices
        names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        return {
            "layout": layout_summary(self.plan)
            | {"gpus_per_node": self.gpus_per_node, "groups": {axis: asdict(g) for axis, g in self.groups.items()}},
            "batch": batch | {"deepspeed": {name: config.get(name) for name in names}},
            "stages": [asdict(stage) for stage in self.stages],
            "schedule": asdict(self.schedule),
            "memory": None if prices is None else _memory(prices, self.hardware),
            "traffic": None if prices is None else _traffic(prices),
            "flops": None if prices is None else asdict(prices.flops),
            "bubble": self.schedule.bubble,
            "time": None if prices is None else _time(prices.time),
            "mfu": None if prices is None else prices.time.mfu["causal"],
            "measured": self.measured,
            "assumptions": {"gpu": asdict(self.hardware)} | ({} if prices is None else _assumed(prices.job)),
            "warnings": list(self.warnings),
        }


def _memory(prices: Prices, hardware: Hardware) -> dict[str, Any]:
    worst = max(prices.memory, key=lambda m: m.allocated)
    return {
        "predicts": "allocated: what torch.cuda.max_memory_allocated reads; reserved and driver are estimates",
        "card_bytes": hardware.memory_bytes,
        "fits": all(m.fits for m in prices.memory),
        "worst_stage": worst.stage,
        "peak": {"allocated": worst.allocated, "reserved": worst.reserved, "driver": worst.driver, "at": worst.peak_at},
        "host_bytes_per_node_at_load": host_at_load(prices.job),
        "communicators": groups_of(prices.job),
        "per_stage": [m.to_dict() for m in prices.memory],
    }


def _traffic(prices: Prices) -> dict[str, Any]:
    """Every rank of a pipeline rank sends the same: `per_rank` is one rank's, `ranks` those it holds for."""
    each, lay = prices.traffic, prices.job.layout
    inner = lay.world_size // lay.pp
    total = {axis: inner * sum(stage[axis]["sent"] for stage in each) for axis in reversed(AXES)}
    return {
        "unit": "bytes a step; sent: by one rank, where collectives are rings; payload: tensors that go in",
        "per_stage": [
            {"stage": i, "ranks": [i * inner, (i + 1) * inner - 1], "per_rank": stage} for i, stage in enumerate(each)
        ],
        "sent_by_all_ranks": total,
    }


def _time(time: StepTime) -> dict[str, Any]:
    return {
        "unit": "seconds of an optimizer step with full rows",
        "parts": time.parts,
        "total": time.total,
        "tokens_per_second": time.tokens_per_second,
        "mfu": time.mfu,
    }


def _assumed(job: Job) -> dict[str, Any]:
    attention = "each row one document" if job.packed else "causal over whole rows"
    return {
        "row_tokens": job.seq,
        "tokens_per_micro_batch_and_rank": job.tokens,
        "attention": attention,
        "loss": "the head and its loss fused over vocabulary shards, logits of 1,024 tokens alive at a time",
        "scope": "the actor's training step with full rows; no generation, reference model or critic",
    }


def forecast(plan: RunPlan, gpus_per_node: int, hardware: Hardware) -> Forecast:
    """Read everything off a plan; ranks fill nodes in order, `gpus_per_node` to each."""
    groups = {axis: _groups(plan, axis, gpus_per_node) for axis in reversed(AXES)}
    job = job_of(plan, gpus_per_node)
    prices = None if job is None else price(job, hardware)
    stages = tuple(_stage(plan, job, rank) for rank in range(plan.layout.pp)) if plan.stages else ()
    schedule = _schedule(plan)
    warnings = _warnings(plan, groups, schedule)
    if prices is not None:
        warnings += _price_warnings(prices, hardware)
    else:
        warnings.append(
            "sizes are not known, nothing is priced: actor.model.model_path names no folder with a config.json, and "
            "num_layers, hidden_size, ffn_hidden_size, num_attention_heads, padded_vocab_size are not all given"
        )
    return Forecast(plan, hardware, gpus_per_node, groups, stages, schedule, prices, tuple(warnings))


def price(job: Job, hardware: Hardware) -> Prices:
    """Memory, traffic, FLOPs and seconds of a job."""
    ranks = range(job.layout.pp)
    traffic = tuple({axis: v.whole() for axis, v in stage_traffic(job, r).items()} for r in ranks)
    memory = tuple(stage_memory(job, r, hardware) for r in ranks)
    return Prices(job, memory, traffic, flops(job), step_time(job, hardware))


def with_measured(result: Forecast, seconds: float) -> Forecast:
    """The forecast beside a measured step; an MFU above 1 says that something was read wrongly, and is not shown."""
    if result.prices is None:
        return replace(result, warnings=(*result.warnings, "the measured step is not compared: sizes are not known"))
    mfu, planned = of_measured(result.prices.job, result.hardware, seconds), result.prices.time.total
    if mfu > 1:
        text = (
            f"a step of {seconds:g} s would need {mfu:.2f} times the peak of {result.hardware.name}: the row length, "
            "the batch, the number of ranks or the machine must have been another"
        )
        return replace(result, measured={"seconds": seconds}, warnings=(*result.warnings, text))
    return replace(result, measured={"seconds": seconds, "mfu": mfu, "over_planned": seconds / planned})


def _groups(plan: RunPlan, axis: str, gpus_per_node: int) -> AxisGroups:
    result = plan.layout.groups(axis)
    across = sum(group[0] // gpus_per_node != group[-1] // gpus_per_node for group in result)
    return AxisGroups(len(result[0]), len(result), across)


def _stage(plan: RunPlan, job: Job | None, rank: int) -> StageForecast:
    runs = tuple(plan.stages[s] for s in plan.pipeline.held(rank))
    return StageForecast(rank, sum(runs), runs, None if job is None else job.elements(rank))


def _schedule(plan: RunPlan) -> ScheduleForecast:
    """The program that the engine runs."""
    schedule = plan.pipeline
    times = played(schedule, plan.batch.gradient_accumulation_steps)
    name = f"{schedule.kind}, wide warm-up" if schedule.wide else schedule.kind
    return ScheduleForecast(
        name, schedule.chunks, times.makespan, times.bubble, times.live, times.idle_inside
    )  # fmt: skip


def _warnings(plan: RunPlan, groups: dict[str, AxisGroups], schedule: ScheduleForecast) -> list[str]:
    result = []
    if groups["tp"].across_nodes:
        result.append(f"{groups['tp'].across_nodes} of {groups['tp'].count} tensor-parallel groups span nodes")
    if groups["cp"].across_nodes and plan.config.actor.model.cp_comm_type == "a2a":
        result.append(f"{groups['cp'].across_nodes} of {groups['cp'].count} Ulysses groups (cp, a2a) span nodes")
    empty = [i for i, layers in enumerate(plan.stages) if not layers]
    if empty:
        result.append(f"pipeline stages without a decoder layer: {', '.join(map(str, empty))}")
    if schedule.bubble > MAX_BUBBLE:
        steps, pp = plan.batch.gradient_accumulation_steps, plan.layout.pp
        result.append(f"bubble {schedule.bubble:.1%}: {steps} micro-batches on {pp} pipeline stages")
    if plan.batch.dynamic:
        result.append("dynamic batches: the number of micro-batches, and so the bubble, differs from step to step")
    if frozen := plan.config.actor.freeze_parameters:
        result.append(f"actor.freeze_parameters={list(frozen)}: frozen weights are priced as trained ones")
    return result


def _price_warnings(prices: Prices, hardware: Hardware) -> list[str]:
    job, result = prices.job, []
    for m in prices.memory:
        if m.fits and m.driver <= NEAR_FULL * hardware.memory_bytes:
            continue
        kinds = m.kinds()
        kinds["optimizer"] = kinds.pop("master weights") + kinds.pop("moments")
        largest = max(kinds, key=lambda name: kinds[name])
        verdict = "near the limit" if m.fits else "does not fit"
        result.append(
            f"stage {m.stage} {verdict}: {m.driver / 2**30:.1f} of {hardware.memory_gib:g} GiB with context, "
            f"communicators and fragmentation; most of it {largest}, {kinds[largest] / 2**30:.1f} GiB"
        )
    real = job.micro_batch * job.seq
    padded = job.sequence.batch * job.sequence.length
    if padded > 1.05 * real:
        result.append(f"padding: {padded} tokens for {real} of a full micro-batch ({1 - real / padded:.1%} waste)")
    vocabulary = -(-job.spec.vocab_size // job.layout.tp) * job.layout.tp
    if vocabulary > 1.02 * job.spec.vocab_size:
        result.append(f"vocabulary of {job.spec.vocab_size} padded to {vocabulary} for tp {job.layout.tp}")
    return result
