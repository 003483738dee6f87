"""Attention kernels, one a file, and the choice among them."""

from __future__ import annotations

from functools import lru_cache

import torch

from hybrid5d.context_parallel.kernels.aten_cpu import AtenCpuKernel
from hybrid5d.context_parallel.kernels.aten_efficient import AtenEfficientKernel
from hybrid5d.context_parallel.kernels.aten_flash import AtenFlashKernel
from hybrid5d.context_parallel.kernels.base import Call, Kernel
from hybrid5d.context_parallel.kernels.chunked import ChunkedKernel
from hybrid5d.context_parallel.kernels.flash_attn import FlashAttnKernel, package_functions

__all__ = ["Call", "Kernel", "available_kernels", "choose_kernel", "device_capability", "kernel_notices"]


def device_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; (8, 0) where there is none to ask (tensors without data, in tests)."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (8, 0)


def _flash_fault(device: torch.device, head_dim: int) -> str:
    """Why flash attention, ours or the package's, cannot run there."""
    capability = device_capability(device)
    if capability < (8, 0):
        return f"flash attention needs compute capability 8.0, this device has {capability[0]}.{capability[1]}"
    if capability in ((8, 6), (8, 9), (12, 0)) and 192 < head_dim <= 224:  # torch's own dispatch excludes it too
        return f"flash attention has no backward for head size {head_dim} at compute capability {capability}"
    return ""


def available_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[str, ...]:
    """Names of the kernels that can run such tensors here, the best first."""
    if device.type == "cpu":
        return ("aten_cpu", "chunked")
    if device.type != "cuda":
        return ("chunked",)
    names = []
    if _fits_flash(dtype, head_dim) and not _flash_fault(device, head_dim):
        names += [] if isinstance(package_functions(), str) else ["flash_attn"]
        built = not torch.cuda.is_available() or torch.backends.cuda.is_flash_attention_available()
        names += ["aten_flash"] if built else []
    if dtype != torch.float64 and head_dim % 8 == 0:
        names.append("aten_efficient")
    return (*names, "chunked")


def kernel_notices(device: torch.device, dtype: torch.dtype, head_dim: int) -> list[str]:
    """What `auto` passes over that the user may expect, and why."""
    if device.type != "cuda" or not _fits_flash(dtype, head_dim):
        return []
    package = package_functions()
    faults = [_flash_fault(device, head_dim), package if isinstance(package, str) else ""]
    names = available_kernels(device, dtype, head_dim)
    return [f"attention: {fault}; {names[0]} is used" for fault in faults if fault][:1]


def _fits_flash(dtype: torch.dtype, head_dim: int) -> bool:
    return dtype in (torch.float16, torch.bfloat16) and head_dim % 8 == 0 and head_dim <= 256


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
