"""What papers and other systems count, in their own conventions: to compare with them, not to plan a run. Pure.

s sequence, b micro-batch, h hidden, a heads, t tensor parallel. Bytes.
"""

from __future__ import annotations

from typing import Literal

Convention = Literal["none", "megatron", "deepspeed2", "deepspeed3", "autotuner"]


def layer(
    s: int, b: int, h: int, a: int, t: int = 1, *, sp: bool = False, recompute: str | None = None, flash: bool = False
) -> float:
    """Kept activations of a GPT layer with dropout and 4h GELU in 16 bits (Korthikanti et al. 2022, arXiv 2205.05198).

    Without SP the norms' and dropouts' 10sbh are whole on every rank. `selective` and flash attention drop the scores;
    `full` keeps the layer's input alone (whole with or without SP).
    """
    if recompute == "full":
        return 2.0 * s * b * h
    whole, cut = (0.0, 34.0) if sp else (10.0, 24.0)
    scores = 0.0 if recompute == "selective" or flash else 5.0 * a * s / h
    return s * b * h * (whole + (cut + scores) / t)


def interleaved(p: int, v: int) -> float:
    """Stage 0's activations with v chunks over those of 1F1B, which are p micro-batches."""
    return 1.0 if v == 1 else 1 + (p - 1) / (p * v)


def stage_zero(s: int, b: int, h: int, a: int, layers: int, t: int, p: int, v: int, **how: bool | str | None) -> float:
    """Kept activations of the first pipeline stage, as the paper's figure 1 shows: p x layers/p = all layers."""
    return layer(s, b, h, a, t, **how) * layers * interleaved(p, v)  # type: ignore[arg-type]


def gpt_states(h: int, layers: int, t: int, p: int, bytes_each: float = 18.0) -> float:
    """Weights, gradients and optimizer of a rank, 12h^2 a layer and no embedding (the paper's figure 1)."""
    return bytes_each * 12 * h * h * layers / (t * p)


def model_states(parameters: int, ranks: int, convention: Convention, largest: int = 0) -> float:
    """Bytes of the states on a rank.

    `none`: 16-bit weights, fp32 gradients, master and two moments, no sharding. `megatron`: its distributed optimizer.
    `deepspeed2`, `deepspeed3`: DeepSpeed's memory page. `autotuner`: what DeepSpeed's autotuner asks for in fp16.
    """
    if convention == "none":
        return 18.0 * parameters
    if convention == "megatron":
        return (6 + 12 / ranks) * parameters
    if convention == "deepspeed2":
        return (4 + 16 / ranks) * parameters
    if convention == "deepspeed3":
        return 4.0 * largest + 18 / ranks * parameters
    return 20.0 * parameters


def deepspeed_host(parameters: int, gpus: int, factor: float = 1.5) -> float:
    """Host memory of a node by DeepSpeed's page where the model is built whole in every process."""
    return 4.0 * parameters * gpus * factor


def logits(tokens: int, vocabulary: int, t: int = 1, chunk: int | None = None) -> dict[str, int]:
    """16-bit logits, their fp32 copy and its gradient, by name; `chunk`: tokens alive at a time."""
    numbers = (min(tokens, chunk) if chunk else tokens) * -(-vocabulary // t)
    return {"bf16": 2 * numbers, "fp32": 4 * numbers, "gradient": 4 * numbers}


def bubble_over_ideal(p: int, m: int, v: int = 1) -> float:
    """Idle time over the ideal step (Narayanan et al. 2021)."""
    return (p - 1) / (v * m)
