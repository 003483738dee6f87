"""Copies from the host that do not stop the device's stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGN = 16  # bytes: views of every type, and whole vector loads


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The CPU tensors on `device`, in one asynchronous copy from pinned memory; themselves where that is the CPU.

    A copy from pageable memory would make the host wait for everything that the stream has queued. The pinned buffer
    goes back to torch's allocator, which hands it out again only when the copy is over.
    """
    if device.type == "cpu" or not tensors:
        return list(tensors)
    sizes = [t.numel() * t.element_size() for t in tensors]
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += -(-size // _ALIGN) * _ALIGN
    host = torch.empty(total, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    for t, start, size in zip(tensors, starts, sizes):
        host[start : start + size].view(t.dtype).copy_(t.reshape(-1))
    there = host.to(device, non_blocking=True)
    return [there[a : a + n].view(t.dtype).view(t.shape) for t, a, n in zip(tensors, starts, sizes)]
