"""Joining the job: torch's process group and DeepSpeed's wrapper of it."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from hybrid5d.shared_memory import SHM, SHM_OR_GLOO, uses_shared_memory

_BACKENDS = {"gloo": "gloo", "shm": SHM, "auto": SHM_OR_GLOO}


def ensure_distributed(timeout_minutes: float = 10.0, cpu_backend: str = "auto") -> None:
    """Make sure torch.distributed and DeepSpeed's communication layer are up; does nothing where they are.

    Under a launcher (RANK, WORLD_SIZE, MASTER_ADDR set) the default group joins all ranks: NCCL where CUDA is there,
    else `cpu_backend` (auto, shm or gloo, see `hybrid5d.shared_memory`). Without one this process is a world of one.
    `timeout_minutes` holds for it and every group made later.

    DeepSpeed's CPU shared-memory op is switched off first (deepspeed.md: The shared-memory op).
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ.setdefault("LOCAL_RANK", os.environ.get("RANK", "0"))  # DeepSpeed's PipelineModule reads it
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else _BACKENDS[cpu_backend]
        timeout = datetime.timedelta(minutes=timeout_minutes)
        # For the groups that DeepSpeed makes without one (deepspeed.md: Timeouts).
        c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timeout
        if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)


def transport() -> str:
    """What the collectives of all ranks go through."""
    return "shared memory" if uses_shared_memory() else dist.get_backend().replace(SHM_OR_GLOO, "gloo")
