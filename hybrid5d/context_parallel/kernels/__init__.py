"""Attention kernels, one a file, and the choice among them."""

from __future__ import annotations

import importlib.util
from functools import lru_cache

import torch

from hybrid5d.context_parallel.kernels.aten_cpu import AtenCpuKernel
from hybrid5d.context_parallel.kernels.aten_efficient import AtenEfficientKernel
from hybrid5d.context_parallel.kernels.aten_flash import AtenFlashKernel
from hybrid5d.context_parallel.kernels.base import Call, Kernel
from hybrid5d.context_parallel.kernels.chunked import ChunkedKernel
from hybrid5d.context_parallel.kernels.flash_attn import FlashAttnKernel

__all__ = ["Call", "Kernel", "available_kernels", "choose_kernel"]


def available_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[str, ...]:
    """Names of the kernels that can run such tensors here, the best first."""
    if device.type == "cpu":
        return ("aten_cpu", "chunked")
    if device.type != "cuda":
        return ("chunked",)
    half = dtype in (torch.float16, torch.bfloat16) and head_dim % 8 == 0 and head_dim <= 256
    names = []
    if half and importlib.util.find_spec("flash_attn") is not None:
        names.append("flash_attn")
    if half:
        names.append("aten_flash")
    if dtype != torch.float64 and head_dim % 8 == 0:
        names.append("aten_efficient")
    return (*names, "chunked")


def choose_kernel(name: str, device: torch.device, dtype: torch.dtype, head_dim: int = 64) -> Kernel:
    """The kernel of that name; `auto` = the best one for such tensors.

    Raises:
        ValueError: unknown name, or one that cannot run such tensors here.
    """
    names = available_kernels(device, dtype, head_dim)
    if name != "auto" and name not in names:
        what = f"{str(dtype).removeprefix('torch.')} on {device.type} with head size {head_dim}"
        raise ValueError(f"attention kernel {name!r} cannot run {what}: use auto or one of {', '.join(names)}")
    return _kernel(names[0] if name == "auto" else name)


@lru_cache
def _kernel(name: str) -> Kernel:
    kinds = (AtenCpuKernel, AtenFlashKernel, AtenEfficientKernel, ChunkedKernel, FlashAttnKernel)
    return {kind.name: kind for kind in kinds}[name]()
