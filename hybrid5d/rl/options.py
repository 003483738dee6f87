"""Reading the YAML's `algorithm` block, given as a mapping or as a config object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def option(algorithm: Any, name: str, default: Any = None) -> Any:
    """A key of the block; `default` where it is absent or null."""
    value = algorithm.get(name) if isinstance(algorithm, Mapping) else getattr(algorithm, name, None)
    return default if value is None else value


def check_shape(name: str, x: Tensor, expected: Tensor) -> None:
    """Raises ValueError where a [B, T] tensor has another shape than the mask."""
    if x.shape != expected.shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, response_mask {tuple(expected.shape)}")


def select(x: Tensor, mask: Tensor) -> Tensor:
    """`x` where the mask is set, 0 elsewhere; whatever stood there (NaN, inf, -9999) and its gradient are gone."""
    return x.masked_fill(~mask, 0.0)
