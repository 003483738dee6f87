"""The flash-attn package, variable-length form.

A ring needs a backward that takes (out, lse) from outside. Neither flash-attn's public functions nor torch's
`varlen_attn` offer one, so this calls the two private ones of flash-attn 2.7 and later.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hybrid5d.context_parallel.kernels.varlen import Offsets, VarlenCall, VarlenKernel

_NAMES = ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward")
_NEEDED = ("window_size_left", "window_size_right", "softcap", "cu_seqlens_q")  # 2.6 and before say window_size


@lru_cache
def package_functions() -> tuple[Callable[..., Any], Callable[..., Any]] | str:
    """flash-attn's forward and backward, or why they cannot be used ("" where nothing of that name is installed)."""
    if importlib.util.find_spec("flash_attn") is None:
        return ""
    try:
        from flash_attn import flash_attn_interface as package

        forward, backward = (getattr(package, name) for name in _NAMES)
        missing = [x for f in (forward, backward) for x in _NEEDED if x not in inspect.signature(f).parameters]
    except Exception as exc:  # a wheel of another torch fails in ways of its own: symbols, operators, drivers
        return f"the flash_attn package that is installed cannot be used ({type(exc).__name__}: {exc})"
    if missing:
        return f"the flash_attn package that is installed is not 2.7 or later (no {missing[0]})"
    return forward, backward


class FlashAttnKernel(VarlenKernel):
    """flash-attn 2 on CUDA: fp16 and bf16, GQA and windows native."""

    name = "flash_attn"

    def __init__(self) -> None:
        result = package_functions()
        if isinstance(result, str):
            raise ValueError(result or "no flash_attn package is installed")
        self._forward, self._backward = result

    def varlen_forward(
        self, flat: Sequence[Tensor], offsets: Offsets, call: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._forward(
            *flat, *offsets, max(call.row_counts), max(call.key_counts), 0.0, scale, causal=call.causal,
            window_size_left=call.left, window_size_right=call.right,
        )  # fmt: skip
        return out, lse

    def varlen_backward(
        self, flat: Sequence[Tensor], lse: Tensor, offsets: Offsets, call: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in flat[1:4])
        self._backward(
            *flat, lse, dq, dk, dv, *offsets, max(call.row_counts), max(call.key_counts), 0.0, scale,
            causal=call.causal, window_size_left=call.left, window_size_right=call.right, softcap=0.0,
            alibi_slopes=None, deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return dq, dk, dv
