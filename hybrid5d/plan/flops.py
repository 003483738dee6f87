"""FLOPs of a step, in the three conventions of attention that the field uses. Pure.

`causal` counts the scores that a causal mask leaves (half of them), `full` all of them, `counter` what
torch.utils.flop_counter counts: all of them, and five products in the fused backward (14 L h s a token where full is 12
and causal 6). The first two are model FLOPs: nothing that is computed again is in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from hybrid5d.hf.spec import ModelSpec
from hybrid5d.plan.job import Job, spec_of
from hybrid5d.plan.run import RunPlan
from hybrid5d.plan.tensors import layer_matmul, tensors

CONVENTIONS = ("causal", "full", "counter")
ATTENTION = {"causal": 6.0, "full": 12.0, "counter": 14.0}  # times S x (heads x head size), a token and layer


def attention_keys(spec: ModelSpec, layer: int, seq: int, convention: str) -> float:
    """Twice the keys that a query meets on average under the mask, seq where all are counted; a window cuts them."""
    window = spec.window(layer)
    if window is None or window >= seq or convention != "causal":
        return float(seq)
    return 2.0 * (window - window * (window - 1) / (2.0 * seq))


def per_token(spec: ModelSpec, seq: int, convention: str = "causal") -> float:
    """Training FLOPs of one token, head included, embedding look-up not (forward once, backward twice)."""
    dense = 6.0 * (spec.num_layers * layer_matmul(spec) + spec.hidden_size * spec.vocab_size)
    width = spec.num_attention_heads * spec.head_dim
    if spec.sliding_window is None or convention != "causal":
        return dense + ATTENTION[convention] * spec.num_layers * seq * width
    keys = sum(attention_keys(spec, i, seq, convention) for i in range(spec.num_layers))
    return dense + ATTENTION[convention] * keys * width


@dataclass(frozen=True)
class Flops:
    """Of one optimizer step, all ranks together.

    Attributes:
        per_token, per_step: by convention; `hardware`: causal, with the forward passes that are computed again.
        recomputed: part of the decoder layers' forward that runs twice.
    """

    attention: str
    per_token: dict[str, float]
    per_step: dict[str, float]
    recomputed: float


def step_tokens(job: Job) -> int:
    """Tokens of an optimizer step over all ranks, rows full."""
    return job.layout.dp * job.micro_batches * job.micro_batch * job.seq


def recomputed_part(job: Job) -> float:
    """Part of the decoder layers whose whole forward is computed again."""
    r, layers = job.recompute, sum(job.stages)
    if r.granularity != "full" or not layers:
        return 0.0
    if r.method == "block":
        return sum(min(r.num_layers or 0, n) for n in job.stages) / layers
    return 1.0


def flops(job: Job) -> Flops:
    """What a step of full rows costs."""
    tokens, spec = step_tokens(job), job.spec
    each = {c: per_token(spec, job.seq, c) for c in CONVENTIONS}
    part = recomputed_part(job)
    layers = each["causal"] - 6.0 * spec.hidden_size * spec.vocab_size
    attention = layers - 6.0 * spec.num_layers * layer_matmul(spec)
    core = attention / 3 if job.recompute.granularity == "selective" else 0.0
    each["hardware"] = each["causal"] + part * layers / 3 + core
    return Flops("causal", each, {name: value * tokens for name, value in each.items()}, part)


def model_line(plan: RunPlan) -> str | None:
    """Parameters and FLOPs a token of the actor; None where the model's sizes are not known."""
    spec, length = spec_of(plan), plan.config.row_length
    if spec is None:
        return None
    count = sum(prod(t.shape) for t in tensors(spec))
    line = f"model: {count:,} parameters"
    return line if length is None else f"{line}, {flop(per_token(spec, length))} a token of rows of {length} (causal)"


def flop(count: float) -> str:
    """A number of FLOP with its unit, three digits."""
    for power, unit in ((15, "PFLOP"), (12, "TFLOP"), (9, "GFLOP"), (6, "MFLOP"), (3, "kFLOP")):
        if count >= 10**power:
            return f"{count / 10**power:.3g} {unit}"
    return f"{count:.3g} FLOP"
