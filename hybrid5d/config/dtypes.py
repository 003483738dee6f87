"""Number formats: one row each, for the YAML, config.json, safetensors files and launchers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DType:
    """A number format.

    Attributes:
        name: the YAML's word for it; `aliases` it accepts too.
        hf: what config.json and torch call it.
        stored: its name in a safetensors file.
        size: bytes of one number.
    """

    name: str
    hf: str
    stored: str
    size: int
    aliases: tuple[str, ...] = ()


PRECISIONS = {
    d.name: d
    for d in (
        DType("fp32", "float32", "F32", 4, ("32", "32-true")),
        DType("bf16", "bfloat16", "BF16", 2, ("bf16-mixed", "bf16-true")),
        DType("fp16", "float16", "F16", 2, ("16", "16-mixed", "16-true")),
    )
}
STORED = {
    d.stored: d for d in (*PRECISIONS.values(), DType("fp64", "float64", "F64", 8), DType("u8", "uint8", "U8", 1))
}


def precision(name: str) -> str | None:
    """fp32, bf16 or fp16 from any of its names; None = none of them."""
    text = name.strip().lower()
    return next((d.name for d in PRECISIONS.values() if text in (d.name, d.hf, *d.aliases)), None)
