"""Rotary position embedding (Su et al. 2021) and the variants Llama and Qwen models use.

Formulas follow the papers with HF transformers' parameter names: linear (position interpolation, Chen et al. 2023),
llama3 (Llama 3.1's wavelength bands), yarn (Peng et al. 2023).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybrid5d.hf.rope import RopeSpec


def _llama3(inv: Tensor, rope: RopeSpec) -> Tensor:
    factor, low, high = rope.get("factor"), rope.get("low_freq_factor"), rope.get("high_freq_factor")
    old_length = rope.get("original_max_position_embeddings")
    wavelength = 2 * math.pi / inv
    smooth = (old_length / wavelength - low) / (high - low)
    blended = (1 - smooth) * inv / factor + smooth * inv
    out = torch.where(wavelength > old_length / low, inv / factor, blended)
    return torch.where(wavelength < old_length / high, inv, out)


def _yarn(rope: RopeSpec, dim: int, max_positions: int) -> tuple[Tensor, float]:
    old_length = rope.get("original_max_position_embeddings") or max_positions
    factor = rope.get("factor") or max_positions / old_length

    def mscale(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    attention = rope.get("attention_factor")
    if attention is None:
        top, bottom = rope.get("mscale"), rope.get("mscale_all_dim")
        attention = mscale(factor, top) / mscale(factor, bottom) if top and bottom else mscale(factor)

    def turns_to_dim(turns: float) -> float:
        return dim * math.log(old_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = turns_to_dim(rope.get("beta_fast") or 32), turns_to_dim(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    base = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return ramp / (factor * base) + (1 - ramp) / base, float(attention)


def rope_frequencies(rope: RopeSpec, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Inverse frequencies [d/2] in fp32 and the factor on cos and sin."""
    if rope.rope_type == "yarn":
        return _yarn(rope, head_dim, max_positions)
    inv = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if rope.rope_type == "linear":
        return inv / rope.get("factor"), 1.0
    if rope.rope_type == "llama3":
        return _llama3(inv, rope), 1.0
    return inv, 1.0


def rope_tables(inv: Tensor, factor: float, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [b, s, 1, d/2] of positions [b, s]; computed in fp32, then cast."""
    angles = positions.to(torch.float32).unsqueeze(-1) * inv.to(positions.device)
    return (
        (angles.cos() * factor).to(dtype).unsqueeze(2),
        (angles.sin() * factor).to(dtype).unsqueeze(2),
    )
