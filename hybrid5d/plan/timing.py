"""Seconds of a step, by part, from FLOPs, bytes and the schedule's program on a machine. Pure.

A roofline of parts: products by their size, attention, bytes that pointwise work moves, collectives that nothing hides,
the schedule's bubble, gradients and weights over dp x cp, the optimizer's passes over memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybrid5d.plan.flops import attention_keys, flops, recomputed_part, step_tokens
from hybrid5d.plan.hardware import Hardware
from hybrid5d.plan.job import Job
from hybrid5d.plan.memory import FP32, kept_by_layer, shape_of, states
from hybrid5d.plan.traffic import Volume, embedding_traffic, head_traffic, layer_traffic, stage_traffic

BACKWARD = 2.0  # products of the backward pass over those of the forward
FLASH_BACKWARD = 2.5


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step by part, on the slowest pipeline rank. Bubble: idle time of the schedule."""

    parts: dict[str, float]
    total: float
    tokens_per_second: float
    mfu: dict[str, float]


@dataclass(frozen=True)
class _Times:
    """Forward and backward of one micro-batch by part, whole decoder layer."""

    products: float
    attention: float
    pointwise: float
    tp: float
    cp: float

    @property
    def total(self) -> float:
        return self.products + self.attention + self.pointwise + self.tp + self.cp


def across(job: Job, axis: str) -> bool:
    """Whether the groups of an axis span nodes where ranks fill them in order."""
    lay, node = job.layout, job.node
    inner = {"tp": 1, "cp": lay.tp, "dp": lay.tp * lay.cp, "pp": lay.tp * lay.cp * lay.dp}[axis]
    width = {"tp": lay.tp, "cp": lay.cp, "dp": lay.dp, "pp": lay.pp}[axis] * inner
    return width > node or (node % width != 0 and lay.world_size > node)


def inside(job: Job, axis: str) -> int:
    """Members of one group of an axis that sit on a node together; dp stands for dp x cp, what ZeRO spreads over."""
    lay = job.layout
    inner = {"tp": 1, "cp": lay.tp, "dp": lay.tp, "pp": lay.tp * lay.cp * lay.dp}[axis]
    size = {"tp": lay.tp, "cp": lay.cp, "dp": lay.dp * lay.cp, "pp": lay.pp}[axis]
    return 1 if axis == "pp" else max(1, min(size, job.node // inner))


def _layer(job: Job, hardware: Hardware) -> _Times:
    spec, n, t, p = job.spec, job.layout.tp, job.tokens, job.precision
    q, kv, h = spec.num_attention_heads * spec.head_dim // n, job.kv_heads * spec.head_dim, spec.hidden_size
    inner = spec.intermediate_size // n
    matmuls = (2.0 * t * h * (q + 2 * kv), 2.0 * t * q * h, 4.0 * t * h * inner, 2.0 * t * inner * h)
    forward = sum(hardware.matmul_seconds(f, p) for f in matmuls)
    keys = attention_keys(spec, 0, job.seq, "causal")
    scores = 2.0 * t * keys * q / (hardware.peak(p) * hardware.attention_efficiency)
    # each kept tensor is written and read once more in the forward pass
    moved = hardware.memory_seconds(2.0 * sum(kept_by_layer(shape_of(job)).values()))
    traffic, again = layer_traffic(job), recomputed_part(job)
    core = max(again, float(job.recompute.granularity == "selective"))
    tp = traffic.tp_forward.times(1 + again) + traffic.tp_backward
    cp = traffic.cp_forward.times(1 + core) + traffic.cp_backward
    attention = scores * (1 + core + FLASH_BACKWARD)
    moving = _wire(job, hardware, "cp", cp)
    if job.cp_method in ("p2p", "all_gather"):
        moving = max(0.0, moving - attention)  # sent while blocks are computed
    return _Times(
        forward * (1 + again + BACKWARD),
        attention,
        moved * (1 + again + BACKWARD),
        _wire(job, hardware, "tp", tp),
        moving,
    )


def _wire(job: Job, hardware: Hardware, axis: str, volume: Volume) -> float:
    if not volume.calls:
        return 0.0
    return hardware.wire_seconds(volume.sent, volume.calls, across(job, axis), inside(job, axis))


def _ends(job: Job, hardware: Hardware) -> tuple[_Times, _Times]:
    """Of the embedding and of norm and head."""
    spec, t = job.spec, job.tokens
    stream = t * spec.hidden_size * job.size
    columns = -(-spec.vocab_size // job.layout.tp)
    product = 3 * hardware.matmul_seconds(2.0 * t * spec.hidden_size * columns, job.precision)
    logits = hardware.memory_seconds(6.0 * t * columns * FP32)
    embedding = _Times(
        0, 0, hardware.memory_seconds(4.0 * stream), _wire(job, hardware, "tp", embedding_traffic(job)), 0
    )
    head = _Times(product, 0, logits, _wire(job, hardware, "tp", head_traffic(job)), 0)
    return embedding, head


def step_time(job: Job, hardware: Hardware) -> StepTime:
    """Seconds of one optimizer step."""
    layer, embedding, head = _layer(job, hardware), *_ends(job, hardware)
    last = job.schedule.stages - 1
    pp, m = job.layout.pp, job.micro_batches

    def load(rank: int) -> float:
        mine = job.schedule.held(rank)
        return job.rank_layers(rank) * layer.total + (0 in mine) * embedding.total + (last in mine) * head.total

    loads = [load(r) for r in range(pp)]
    slowest = max(range(pp), key=lambda r: loads[r])
    mine, layers = job.schedule.held(slowest), job.rank_layers(slowest)

    def part(name: str) -> float:
        one = layers * getattr(layer, name)
        return m * (one + (0 in mine) * getattr(embedding, name) + (last in mine) * getattr(head, name))

    units = job.times.makespan / (3 * job.schedule.chunks)  # in whole micro-batches of a rank
    traffic = stage_traffic(job, slowest)
    hidden = 1.0 if pp == 1 else (pp - 1 + m) / m  # the fill's messages; those of the steady state hide behind work
    one_message = traffic["pp"].times(1 / max(2 * m, 1))
    zero_axis, st = "dp" if job.layout.dp > 1 else "cp", states(job, slowest)
    parts = {
        "products": part("products"),
        "attention": part("attention"),
        "pointwise": part("pointwise"),
        "tensor_parallel": part("tp"),
        "context_parallel": part("cp"),
        "bubble": (units - m) * sum(loads) / pp,
        "pipeline": _wire(job, hardware, "pp", one_message) * m * hidden if pp > 1 else 0.0,
        "data_parallel": _wire(job, hardware, zero_axis, traffic["dp"]) * (1 - hardware.overlap_dp),
        "optimizer": hardware.memory_seconds(2.0 * (st.master + st.moments) + st.gradients + st.weights),
    }
    parts = {name: seconds * hardware.software for name, seconds in parts.items()}
    total = sum(parts.values())
    result, world = flops(job), job.layout.world_size
    peak = hardware.peak(job.precision) * world
    mfu = {name: result.per_step[name] / (total * peak) for name in ("causal", "full", "counter")}
    return StepTime(parts, total, step_tokens(job) / total, mfu)


def of_measured(job: Job, hardware: Hardware, seconds: float) -> float:
    """MFU (causal) of a measured step; above 1 the measurement, or what was read of the run, cannot be right."""
    return flops(job).per_step["causal"] / (seconds * hardware.peak(job.precision) * job.layout.world_size)
