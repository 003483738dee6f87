"""Bytes that a step keeps on one rank, tensor by tensor, by pipeline rank. Pure.

Counted are the tensors that this package's layers and DeepSpeed's optimizers hold, in the dtypes of the run; not a
formula of a paper (those are in `plan.papers`). Legend: T tokens of a micro-batch on the rank, T' of the residual
stream (T/tp with SP), H hidden, I MLP width, q and kv head widths, n = tp size, e bytes of a number, P numbers of
weights on the rank, d = dp x cp.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from hybrid5d.hf.spec import ModelSpec
from hybrid5d.plan.hardware import Hardware
from hybrid5d.plan.job import Job
from hybrid5d.plan.tensors import layer_elements

CHUNK_TOKENS = 1024  # tokens whose logits are alive at a time (tensor_parallel.HeadOptions)
FP32 = 4


@dataclass(frozen=True)
class LayerShape:
    """What the kept tensors of one decoder layer depend on."""

    spec: ModelSpec
    tp: int
    kv_heads: int
    tokens: int
    stream: int
    size: int
    ulysses: int


def shape_of(job: Job) -> LayerShape:
    """The layer of a job."""
    ulysses = {"a2a": job.layout.cp, "a2a+p2p": job.ulysses}.get(job.cp_method, 1)
    return LayerShape(job.spec, job.layout.tp, job.kv_heads, job.tokens, job.stream, job.size, ulysses)


@lru_cache(maxsize=4096)
def kept_by_layer(s: LayerShape) -> dict[str, int]:
    """Bytes of each tensor that a decoder layer keeps for its backward pass, one micro-batch.

    The norms keep their normalised input, not the residual stream; v stays a view of the projection, so the whole
    projection lives, except behind an all-to-all (Ulysses), whose results are tensors of their own.
    """
    spec, n, t, e = s.spec, s.tp, s.tokens, s.size
    heads, d = spec.num_attention_heads // n, spec.head_dim
    q, kv = heads * d, s.kv_heads * d
    long_kv = max(s.kv_heads, s.ulysses) * d  # kv heads fewer than the Ulysses degree are repeated
    kept = {
        "norms' normalised inputs": 2 * s.stream * spec.hidden_size * e,
        "norms' statistics": 2 * s.stream * FP32,
        "inputs of qkv and gate_up": 2 * s.stream * spec.hidden_size * e,
        "attention output": t * q * e,
        "row statistics": t * heads * FP32,
        "gate and up": 2 * t * (spec.intermediate_size // n) * e,
        "their product": t * (spec.intermediate_size // n) * e,
    }
    if s.ulysses > 1:
        kept["q, k, v of the long sequence"] = t * (q + 2 * long_kv) * e
        kept["output of the long sequence"] = t * q * e
    else:
        shared = s.spec.num_key_value_heads < n  # k and v are a matrix of their own then
        kept["projection that v is a view of"] = t * ((0 if shared else q) + 2 * kv) * e
        kept["rotated q, k"] = t * (q + kv) * e
    if spec.qk_norm:
        kept["normalised q, k"] = t * (q + kv) * e
        kept["statistics of q, k"] = t * (heads + s.kv_heads) * FP32
    return kept


def recomputed_in_core(s: LayerShape) -> int:
    """Bytes that `selective` does not keep: what the attention core makes inside (flash: no scores in any case)."""
    kept = kept_by_layer(s)
    names = ("row statistics", "q, k, v of the long sequence", "output of the long sequence")
    saved = sum(kept.get(name, 0) for name in names)
    if s.ulysses > 1:  # what enters the core is kept instead
        heads, d = s.spec.num_attention_heads // s.tp, s.spec.head_dim
        saved -= s.tokens * (2 * heads + 3 * s.kv_heads) * d * s.size
    return saved


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on a run of layers, and of what recomputation needs on top while it runs."""

    kept: int
    working_set: int


@lru_cache(maxsize=65536)
def activations(
    s: LayerShape, layers: int, granularity: str | None, method: str | None, count: int | None
) -> Activations:
    """Of `layers` decoder layers of one stage."""
    layer, stream = sum(kept_by_layer(s).values()), s.stream * s.spec.hidden_size * s.size
    if granularity == "selective":
        saved = recomputed_in_core(s)
        return Activations(layers * (layer - saved), max(saved, 0) if layers else 0)
    if granularity != "full" or not layers:
        return Activations(layers * layer, 0)
    n = count or 1
    if method == "block":
        first = min(n, layers)
        return Activations(first * stream + (layers - first) * layer, layer if first else 0)
    groups = -(-layers // n)
    return Activations(groups * stream, min(n, layers) * layer)


def of_micro_batch(job: Job, rank: int) -> Activations:
    """Activations of one micro-batch on all chunks of a pipeline rank, the residual stream at their ends included."""
    s, r = shape_of(job), job.recompute
    found = [activations(s, job.stages[i], r.granularity, r.method, r.num_layers) for i in job.schedule.held(rank)]
    boundary = job.stream * job.spec.hidden_size * job.size
    kept = sum(a.kept for a in found)
    for stage in job.schedule.held(rank):
        kept += boundary * ((stage > 0) + (stage < job.schedule.stages - 1))  # received input; output until it is used
        if stage == job.schedule.stages - 1:  # final norm
            kept += job.stream * (job.spec.hidden_size * job.size + FP32)
    return Activations(kept, max(a.working_set for a in found))


def backward_bytes(job: Job) -> int:
    """What the feed-forward's backward makes on top: gradients of product, gate and up, and two factors of theirs."""
    return 5 * job.tokens * (job.spec.intermediate_size // job.layout.tp) * job.size


def head_bytes(job: Job) -> tuple[int, int]:
    """(kept from forward to backward, alive on top of it while the loss is computed), of the last stage, a micro-batch.

    The fused head keeps the gradient of its input and, with ZeRO 2 and 3, of its matrix in fp32: below, that one is
    added where gradients accumulate. Logits live in chunks of tokens.
    """
    spec, n, t = job.spec, job.layout.tp, job.tokens
    columns = -(-spec.vocab_size // n)
    kept = t * spec.hidden_size * job.size + (columns * spec.hidden_size * FP32 if job.zero >= 2 else 0)
    rows = min(CHUNK_TOKENS, t)
    logits = rows * columns * FP32
    narrow = rows * columns * job.size if job.size < FP32 else 0
    matrix = columns * spec.hidden_size * (FP32 if job.size < FP32 else 0)  # a chunk's part of its gradient
    whole = t * spec.hidden_size * job.size if n > 1 else 0
    return kept, logits + narrow + matrix + whole


def batch_bytes(job: Job) -> int:
    """Ids, labels, positions (int64) and rotary tables of all micro-batches of the step."""
    return job.micro_batches * job.tokens * (3 * 8 + job.spec.head_dim * job.size)


@dataclass(frozen=True)
class States:
    """Bytes before the step on a rank, and the numbers that ZeRO spreads."""

    weights: int
    gradients: int
    master: int
    moments: int
    host: int
    sharded: str  # in words: what of it is spread over dp x cp


def states(job: Job, rank: int) -> States:
    """Weights, gradients, master copy and moments of a pipeline rank, from the dtypes of the run.

    Gradients are accumulated in fp32 whatever the precision (`data_types.grad_accum_dtype`).
    """
    p, d = job.elements(rank), job.shards
    weights, gradients = p * job.size, p * FP32
    words = f"gradients: fp32, {'not sharded' if job.zero < 2 else f'sharded over {d}'}"
    if job.zero >= 2:
        gradients = -(-gradients // d)
    if job.zero == 3:
        weights = -(-weights // d)
    master, moments = -(-p // d) * FP32, -(-p // d) * FP32 * job.moments
    host = round((master + moments) * job.offload)
    left = 1 - job.offload
    return States(weights, gradients, round(master * left), round(moments * left), host, words)


@dataclass(frozen=True)
class StageMemory:
    """One rank of a pipeline stage, bytes.

    Attributes:
        in_flight: micro-batches' worth of the rank's layers alive at once.
        recompute: working set of the layers that are computed again; logits: what the loss keeps and makes.
        buffers: DeepSpeed's buckets and what the batch itself takes, by name.
        allocated: the most that is alive at once: what torch.cuda.max_memory_allocated reads. The prediction.
        peaks: that, outside and inside the step; peak_at names the largest.
        reserved, driver: estimates of what the caching allocator holds and what nvidia-smi shows.
        outside: context and communicators.
    """

    stage: int
    parameters: int
    in_flight: float
    weights: int
    gradients: int
    master_weights: int
    moments: int
    activations: int
    recompute: int
    logits: int
    buffers: dict[str, int]
    states: str
    peaks: dict[str, int]
    peak_at: str
    allocated: int
    reserved: int
    driver: int
    outside: dict[str, int]
    fits: bool

    def kinds(self) -> dict[str, int]:
        """Bytes by kind, under names for people; they peak apart."""
        return {
            "weights": self.weights, "gradients": self.gradients, "master weights": self.master_weights,
            "moments": self.moments, "activations": self.activations, "recomputation": self.recompute,
            "logits": self.logits, "buffers": sum(self.buffers.values()),
        }  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """As JSON shows it; `optimizer` is master copy and moments."""
        found = asdict(self)
        return found | {"optimizer": self.master_weights + self.moments}


def buffers(job: Job, rank: int) -> dict[str, int]:
    """What DeepSpeed allocates beside states, from the resolved config, and the batch's own tensors."""
    p, found = job.elements(rank), {"batch": batch_bytes(job)}
    if job.zero == 1 and job.precision == "fp32":
        return found  # gradients are reduced where they accumulate
    flat = min(job.bucket("reduce_bucket_size"), p)
    found["reduce bucket"] = flat * FP32
    if job.zero >= 2:  # gradients wait until a bucket is full, then one flat copy is reduced
        found["gradients of a bucket"] = flat * (FP32 + (job.size if job.zero == 3 and job.size < FP32 else 0))
    if job.zero == 3:
        spec, tp = job.spec, job.layout.tp
        largest = max(layer_elements(spec, tp), -(-spec.vocab_size // tp) * spec.hidden_size)
        live = min(job.bucket("stage3_max_live_parameters"), p, 2 * largest + job.bucket("stage3_prefetch_bucket_size"))
        found["gathered parameters"] = live * job.size
    return found


def norm_bytes(job: Job) -> int:
    """What DeepSpeed's norm of ZeRO 1 makes in fp32: a copy of each gradient in fp64; the largest matrix's."""
    if job.zero > 1 or job.precision != "fp32":
        return 0
    spec, tp = job.spec, job.layout.tp
    widest = max(2 * (spec.intermediate_size // tp), -(-spec.vocab_size // tp))
    return 2 * FP32 * widest * spec.hidden_size


def groups_of(job: Job) -> dict[str, int]:
    """Communicators that a rank is in -> their sizes; an embedding pair joins the ends of a tied model."""
    lay = job.layout
    sizes = {"world": lay.world_size, "tp": lay.tp, "cp": lay.cp, "pp": lay.pp, "dp": lay.dp}
    if lay.dp > 1 and lay.cp > 1:
        sizes["dp_cp"] = lay.dp * lay.cp
    if job.cp_method == "a2a+p2p" and lay.cp > 1:
        sizes |= {"ulysses": job.ulysses, "ring": lay.cp // job.ulysses}
    if job.spec.tied and lay.pp > 1:
        sizes["embedding"] = 2
    return {name: size for name, size in sizes.items() if size > 1}


def stage_memory(job: Job, rank: int, hardware: Hardware) -> StageMemory:
    """The memory of one pipeline rank."""
    st, micro = states(job, rank), of_micro_batch(job, rank)
    live = job.times.live[rank] / job.schedule.chunks
    last = job.schedule.place(job.schedule.stages - 1)[0] == rank
    held, loss = head_bytes(job) if last else (0, 0)
    heads = job.micro_batches if job.schedule.kind == "gpipe" else 1
    act, extra = round(live * micro.kept), buffers(job, rank)
    p, logits = job.elements(rank), heads * held + loss
    reduction = extra.get("reduce bucket", 0) + extra.get("gradients of a bucket", 0)
    resting = st.weights + st.gradients + st.master + st.moments + extra["batch"]
    work = max(micro.working_set + (backward_bytes(job) if job.rank_layers(rank) else 0), logits)
    # Gradients are reduced after the last backward pass (ZeRO 1) or as activations go; in fp32 with ZeRO 3 all of these
    # live still (measured).
    gone = micro.kept * min(1.0, job.bucket("reduce_bucket_size") / p) if job.zero > 1 else act
    if job.zero == 3 and job.precision == "fp32":
        gone = 0
    step = resting + max(act + work + extra.get("gathered parameters", 0), round(act - gone) + reduction)
    update = norm_bytes(job) if job.moments == 2 and not job.offload else st.master  # fused AdamW makes no temporaries
    peaks = {
        "load": p * FP32,
        "optimizer_creation": st.weights + st.master + (st.gradients if job.zero < 2 else p * FP32),
        "step": step,
        "optimizer_step": resting + update,
    }
    at = max(peaks, key=lambda name: peaks[name])
    outside = {"context": hardware.context_bytes, "communicators": len(groups_of(job)) * hardware.communicator_bytes}
    reserved = round(peaks[at] * (1 + hardware.fragmentation))
    driver = reserved + sum(outside.values())
    return StageMemory(
        stage=rank, parameters=p, in_flight=live, weights=st.weights, gradients=st.gradients,
        master_weights=st.master, moments=st.moments, activations=act, recompute=micro.working_set, logits=logits,
        buffers=extra, states=st.sharded, peaks=peaks, peak_at=at, allocated=peaks[at], reserved=reserved,
        driver=driver, outside=outside, fits=driver <= hardware.memory_bytes * (1 - hardware.headroom),
    )  # fmt: skip


def host_at_load(job: Job) -> int:
    """Host memory of a node while weights are read: each rank's shard in fp32 and the largest tensor whole; offload."""
    ranks = range(job.layout.pp)
    shard = max(job.elements(r) for r in ranks) * FP32
    whole = max(job.spec.vocab_size, 2 * job.spec.intermediate_size) * job.spec.hidden_size * FP32
    return min(job.node, job.layout.world_size) * (shard + whole + max(states(job, r).host for r in ranks))
