"""Joining the job: torch's process group and DeepSpeed's wrapper of it."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from hybrid5d.devices import device_index
from hybrid5d.errors import ConfigError, ConfigErrors
from hybrid5d.parallel.same import compare
from hybrid5d.shared_memory import SHM, SHM_OR_GLOO, uses_shared_memory

_BACKENDS = {"gloo": "gloo", "shm": SHM, "auto": SHM_OR_GLOO}


def device_type() -> str:
    """`cuda` or `cpu`: DeepSpeed's accelerator decides (DS_ACCELERATOR, else what is there), for all of us.

    Raises:
        ConfigErrors: DeepSpeed took another kind.
    """
    from deepspeed.accelerator import get_accelerator

    name = str(get_accelerator()._name)
    if name in ("cuda", "cpu"):
        return name
    raise ConfigErrors([ConfigError("DS_ACCELERATOR", name, "hybrid5d runs on cuda and cpu", "set it to one of them")])


def current_device() -> torch.device:
    """The device of this rank's tensors."""
    kind = device_type()
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def take_device() -> None:
    """Make this rank's CUDA device the current one, before anything is allocated or any group exists; nothing on a CPU.

    Raises:
        ConfigErrors: no CUDA device, or fewer than ranks on this node.
    """
    if device_type() == "cpu":
        return
    index = device_index(os.environ, torch.cuda.device_count())
    if isinstance(index, ConfigError):
        raise ConfigErrors([index])
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):  # DeepSpeed places modules there, and compares the two
        if name in os.environ:
            os.environ[name] = str(index)
    torch.cuda.set_device(index)
    _name_devices_by_number()


def _name_devices_by_number() -> None:
    """DeepSpeed asks NVML for free memory by the number in CUDA_VISIBLE_DEVICES, where UUIDs may stand.

    Without NVML it takes torch's own figure (accelerator/cuda_accelerator.py: available_memory).
    """
    from deepspeed.accelerator import cuda_accelerator

    words = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    if not all(word.strip().lstrip("-").isdigit() for word in words):
        cuda_accelerator.pynvml = None


def ensure_distributed(
    timeout_minutes: float = 10.0,
    cpu_backend: str = "auto",
    facts: Mapping[str, Any] | None = None,
    met: Callable[[dist.Store], None] = lambda store: None,
) -> None:
    """Make sure torch.distributed and DeepSpeed's communication layer are up; does nothing where they are.

    Under a launcher (RANK, WORLD_SIZE, MASTER_ADDR set) the default group joins all ranks: NCCL where CUDA is there,
    else `cpu_backend` (auto, shm or gloo, see `hybrid5d.shared_memory`). Without one this process is a world of one.
    `timeout_minutes` holds for it and every group made later.

    `facts` must be equal on all ranks, and are compared before the group is made; `met` is called then.

    DeepSpeed's CPU shared-memory op is switched off first (deepspeed.md: The shared-memory op).

    Raises:
        ConfigErrors: facts that differ, on every rank.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ.setdefault("LOCAL_RANK", os.environ.get("RANK", "0"))  # DeepSpeed's PipelineModule reads it
    take_device()
    if not dist.is_initialized():
        backend = "nccl" if device_type() == "cuda" else _BACKENDS[cpu_backend]
        timeout = datetime.timedelta(minutes=timeout_minutes)
        # For the groups that DeepSpeed makes without one (deepspeed.md: Timeouts).
        c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timeout
        if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
            compare(store, rank, world, facts or {})
            met(store)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)


def transport() -> str:
    """What the collectives of all ranks go through."""
    return "shared memory" if uses_shared_memory() else dist.get_backend().replace(SHM_OR_GLOO, "gloo")
