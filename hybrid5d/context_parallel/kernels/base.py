"""What an attention kernel is, and what several of them share.

A kernel returns (out, lse), and its backward takes both from outside. All tensors are [b, s, heads, d] with any strides
(last one 1); lse is [b, heads, s] fp32. A kernel computes one `Call` on tensors cut for it. GQA: fewer kv heads than
query heads, never expanded by the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from hybrid5d.plan.sequence_blocks import Block


class Call(Protocol):
    """What one kernel call covers: rows of the queries, keys, and whether earlier calls touched these rows.

    `tensors`: those that must lie on the device; `placed` gives the same call with them there.
    """

    @property
    def rows(self) -> slice | Tensor: ...

    @property
    def keys(self) -> slice | Tensor: ...

    @property
    def first(self) -> bool: ...

    @property
    def tensors(self) -> Sequence[Any]: ...

    def placed(self, there: Any) -> Call: ...


class Kernel(Protocol):
    """One way to compute blocks of attention."""

    name: str
    native_window: bool  # computes a sliding window as one block; else it is cut into strips

    def calls(self, blocks: tuple[Block, ...], batch: int) -> Sequence[Call]:
        """How the kernel computes a step's blocks of `batch` rows: one call each, or several in one."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Any, scale: float) -> tuple[Tensor, Tensor]:
        """q [b, m, nq, d], k, v [b, n, nkv, d] -> out [b, m, nq, d] (q's type or fp32), lse [b, nq, m]."""

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Any, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k, v (their type or fp32) through this call, given the final out and lse of its rows."""


class BlockKernel:
    """A kernel that computes one block a call."""

    name = ""
    native_window = False

    def calls(self, blocks: tuple[Block, ...], batch: int) -> Sequence[Call]:
        return blocks


def heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


@lru_cache(maxsize=64)
def band_mask(m: int, n: int, shift: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive mask [1, 1, m, n]: 0 where 0 <= i - j + shift < window, else -inf. Small: a strip, never S x S."""
    age = torch.arange(m, device=device)[:, None] + shift - torch.arange(n, device=device)
    mask = torch.zeros(age.shape, dtype=dtype, device=device)
    return mask.masked_fill_((age < 0) | (age >= window), float("-inf"))[None, None]
