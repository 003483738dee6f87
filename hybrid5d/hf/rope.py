"""The rotary embedding that a config.json asks for, as transformers 5.24 reads it (modeling_rope_utils.py). Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NEEDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}  # what each variant cannot do without
POSITIVE = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
NUMBERS = (*POSITIVE, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
KNOWN = (*NUMBERS, "rope_type", "type", "truncate", "partial_rotary_factor")
ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: base, variant and the variant's parameters (HF names)."""

    theta: float = 10000.0
    rope_type: str = "default"
    parameters: tuple[tuple[str, Any], ...] = ()

    def get(self, name: str, default: Any = None) -> Any:
        return dict(self.parameters).get(name, default)


def is_number(value: Any, kinds: tuple[type, ...] = (int, float)) -> bool:
    """Neither a bool nor an infinity nor NaN."""
    return type(value) in kinds and abs(value) <= sys.float_info.max


def rope_key(text: Mapping[str, Any]) -> str:
    """Which of the two names counts: rope_scaling, where it is not empty, replaces rope_parameters whole."""
    return "rope_scaling" if text.get("rope_scaling") else "rope_parameters"


def _parameters(text: Mapping[str, Any]) -> dict[str, Any]:
    """The block that counts, with the keys beside it that fill it up."""
    result = {"rope_theta": text.get("rope_theta", 10000.0), **(text.get(rope_key(text)) or {})}
    result.setdefault("rope_type", result.get("type", "default"))
    if result["rope_type"] in ("llama3", "yarn"):
        result.setdefault(ORIGINAL, text.get("max_position_embeddings"))
        if ORIGINAL in text:  # beside the block it wins over the one inside
            result[ORIGINAL] = text[ORIGINAL]
    return result


def rope_faults(text: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    """(key, value, rule) of what keeps the embedding from being computed, or that we would not read."""
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(text.get(name), dict | None):
            return [(name, text[name], "an object is needed")]
    name, result = rope_key(text), _parameters(text)
    block, variant = text.get(name) or {}, result["rope_type"]
    nested = [k for k, v in result.items() if isinstance(v, dict)]
    unknown = [k for k in result if k not in KNOWN]
    if nested:
        return [(name, block, f"rotary embeddings of their own for {', '.join(nested)} layers are not supported")]
    if variant not in NEEDS:
        return [("rope_type", variant, f"supported rope variants are {', '.join(NEEDS)}")]
    if unknown:
        return [(name, block, f"{', '.join(unknown)}: no part of the rotary embedding of these families")]
    # yarn takes max_position_embeddings / original_max_position_embeddings where its factor is null
    missing = [n for n in NEEDS[variant] if result.get(n) is None and (n not in result or variant != "yarn")]
    if missing:
        return [(name, block, f"{variant} needs {', '.join(missing)}")]
    if result.get("partial_rotary_factor") not in (None, 1):
        return [(name, block, "partial_rotary_factor: these families rotate the whole head")]
    faults = [
        (name, block, f"{n}: {rule}") if n in block else (n, result[n], rule)
        for n in NUMBERS
        if n in result and (rule := _wrong_number(n, result[n]))
    ]
    if not faults and variant == "llama3" and result["high_freq_factor"] <= result["low_freq_factor"]:
        return [(name, block, "high_freq_factor must be above low_freq_factor")]
    return faults


def _wrong_number(name: str, value: Any) -> str:
    if value is None and name not in ("rope_theta", ORIGINAL):
        return ""
    if not is_number(value):
        return "a number is needed"
    return "a number above 0 is needed" if name in POSITIVE and value <= 0 else ""


def read_rope(text: Mapping[str, Any]) -> RopeSpec:
    """The embedding of a config without `rope_faults`."""
    result = _parameters(text)
    theta, variant = result.pop("rope_theta"), result.pop("rope_type")
    result.pop("type", None)
    return RopeSpec(float(theta), str(variant), tuple(sorted(result.items())))
