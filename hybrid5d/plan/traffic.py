"""Bytes that ranks exchange in a step, by axis. Pure.

`payload` is the size of the tensors that go into collectives (an all-gather's and a reduce-scatter's whole tensor;
sends and receives between stages both count, as in Megatron-LM pull 482); `sent` what one rank puts on the wire where
each collective is a ring: 2(n-1)/n of an all-reduce, (n-1)/n of the others.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache

from hybrid5d.plan.flops import recomputed_part
from hybrid5d.plan.job import Job
from hybrid5d.plan.memory import CHUNK_TOKENS, FP32


@dataclass(frozen=True)
class Volume:
    """Of one rank and step: number of operations, payload, and what the rank sends."""

    calls: float = 0
    payload: float = 0
    sent: float = 0

    def __add__(self, other: Volume) -> Volume:
        return Volume(self.calls + other.calls, self.payload + other.payload, self.sent + other.sent)

    def times(self, n: float) -> Volume:
        """n of it."""
        return Volume(n * self.calls, n * self.payload, n * self.sent)

    def whole(self) -> dict[str, int]:
        """As JSON shows it."""
        return {name: round(value) for name, value in asdict(self).items()}


NONE = Volume()


def all_reduce(size: float, n: int) -> Volume:
    """An all-reduce of `size` bytes over n ranks."""
    return Volume(1, size, 2 * (n - 1) / n * size) if n > 1 else NONE


def gather(size: float, n: int) -> Volume:
    """An all-gather to, or reduce-scatter of, `size` bytes over n ranks."""
    return Volume(1, size, (n - 1) / n * size) if n > 1 else NONE


@dataclass(frozen=True)
class LayerTraffic:
    """Of one decoder layer and micro-batch: forward and backward on tp and on cp."""

    tp_forward: Volume
    tp_backward: Volume
    cp_forward: Volume
    cp_backward: Volume


@lru_cache(maxsize=65536)
def layer_traffic(job: Job) -> LayerTraffic:
    """Megatron's f and g: two all-reduces each way; with SP a gather and a scatter for each, the gathered inputs of the
    column layers and the gradients of the row layers gathered again in backward (only shards are kept)."""
    n, size = job.layout.tp, job.tokens * job.spec.hidden_size * job.size
    if job.sp:
        forward, backward = gather(size, n).times(4), gather(size, n).times(6)
    else:
        forward = backward = all_reduce(size, n).times(2)
    return LayerTraffic(forward, backward, *_context(job))


def _context(job: Job) -> tuple[Volume, Volume]:
    """Keys and values round the ring (their gradients in fp32 on the way back), or heads against sequence."""
    cp, d, t, e = job.layout.cp, job.spec.head_dim, job.tokens, job.size
    if cp == 1:
        return NONE, NONE
    u = {"a2a": cp, "a2a+p2p": job.ulysses}.get(job.cp_method, 1)
    ring, forward, backward = cp // u, NONE, NONE
    q, kv = job.spec.num_attention_heads // job.layout.tp, max(job.kv_heads, u)
    if u > 1:
        way = (u - 1) / u
        heads = Volume(1, t * (q + 2 * kv) * d * e, way * t * (q + 2 * kv) * d * e)
        back = Volume(1, t * q * d * e, way * t * q * d * e)
        forward, backward = heads + back, heads + back
    if ring > 1:
        numbers = 2 * t * kv * d  # of one block: u times the tokens, a u-th of the heads
        hops = ring - 1 if job.spec.sliding_window is None else job.sequence.hops(job.spec.sliding_window)
        if job.cp_method == "all_gather" and job.balance == "contiguous":
            hops = (ring - 1) / 2  # type: ignore[assignment]  # on average: the mask empties the others
        move = Volume(hops, hops * numbers * e, hops * numbers * e)
        grads = Volume(hops, hops * numbers * FP32, hops * numbers * FP32)
        forward, backward = forward + move, backward + move + grads
    return forward, backward


def head_traffic(job: Job) -> Volume:
    """The head's on tp, a micro-batch: into the region and back, maximum and sums of each chunk of logits."""
    n, size = job.layout.tp, job.tokens * job.spec.hidden_size * job.size
    enter = gather(size, n).times(2) if job.sp else all_reduce(size, n)
    each = all_reduce(job.tokens * FP32, n) + all_reduce(2 * job.tokens * FP32, n)
    return enter + Volume(each.calls * -(-job.tokens // CHUNK_TOKENS), each.payload, each.sent)


def embedding_traffic(job: Job) -> Volume:
    """The embedding's on tp, a micro-batch."""
    n, size = job.layout.tp, job.tokens * job.spec.hidden_size * job.size
    return gather(size, n).times(2) if job.sp else all_reduce(size, n)


def stage_traffic(job: Job, rank: int) -> dict[str, Volume]:
    """By axis, of each rank of a pipeline rank and step."""
    m, layers = job.micro_batches, job.rank_layers(rank)
    again, each = recomputed_part(job), layer_traffic(job)
    core = 1.0 if job.recompute.granularity == "selective" else 0.0
    tp = (each.tp_forward.times(1 + again) + each.tp_backward).times(layers * m)
    cp = (each.cp_forward.times(1 + max(again, core)) + each.cp_backward).times(layers * m)
    mine = job.schedule.held(rank)
    if 0 in mine:
        tp += embedding_traffic(job).times(m)
    if job.schedule.stages - 1 in mine:
        tp += head_traffic(job).times(m)
    if job.layout.tp > 1:
        tp += all_reduce(_partial(job, rank) * FP32, job.layout.tp)
    return {"tp": tp, "cp": cp, "pp": _pipeline(job, rank), "dp": _data(job, rank)}


def _partial(job: Job, rank: int) -> int:
    """Numbers whose gradients are summed over tp once a step: weights that see a part of the tokens or heads."""
    spec, layers = job.spec, job.rank_layers(rank)
    last = job.schedule.stages - 1 in job.schedule.held(rank)
    norms = (2 * layers + last) * spec.hidden_size if job.sp else 0
    biases = layers * spec.hidden_size * (spec.attention_out_bias + spec.mlp_bias) if job.sp else 0
    return norms + biases + (2 * layers * spec.head_dim if spec.qk_norm else 0)


def _pipeline(job: Job, rank: int) -> Volume:
    """Hidden states to the next stage and gradients to the one before; a tied matrix's gradient between the ends."""
    size, found = job.stream * job.spec.hidden_size * job.size, NONE
    for stage in job.schedule.held(rank):
        for other in (stage - 1, stage + 1):
            if 0 <= other < job.schedule.stages and job.schedule.place(other)[0] != rank:
                found += Volume(2, 2 * size, size).times(job.micro_batches)  # one sent, one received
    ends = {job.schedule.place(0)[0], job.schedule.place(job.schedule.stages - 1)[0]}
    if job.spec.tied and rank in ends and len(ends) == 2:
        found += all_reduce(-(-job.spec.vocab_size // job.layout.tp) * job.spec.hidden_size * FP32, 2)
    return found


def _data(job: Job, rank: int) -> Volume:
    """Over dp x cp. ZeRO 1: fp32 gradients once, in fp32 to the rank that updates with them, else all-reduced, and one
    gather of weights; 2: scattered; 3: weights are gathered for each forward and backward."""
    d, p = job.shards, job.elements(rank)
    gradients, weights = p * FP32, p * job.size
    if job.zero == 1:
        return (gather if job.precision == "fp32" else all_reduce)(gradients, d) + gather(weights, d)
    if job.zero == 2:
        return all_reduce(gradients, d).times(job.micro_batches) + gather(weights, d)
    return (gather(weights, d).times(2) + gather(gradients, d)).times(job.micro_batches)
