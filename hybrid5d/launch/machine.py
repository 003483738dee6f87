"""What this machine offers a run: for bug reports, and before the first run. Imports torch and DeepSpeed."""

from __future__ import annotations

import os
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from hybrid5d.console import package_version
from hybrid5d.context_parallel.kernels import available_kernels
from hybrid5d.engine.deepspeed.distributed import device_type
from hybrid5d.engine.deepspeed.ops import usable_ops
from hybrid5d.launch.env import LaunchEnv, environment, gpu_facts, nccl_version
from hybrid5d.models.dtypes import DTYPES
from hybrid5d.shared_memory import unavailable
from hybrid5d.shared_memory.segment import FOLDER

GIB = 2**30
HEAD_SIZE = 128
_RUN = ("command", "launcher", "world_size", "ranks_per_node", "device", "gpu", "cuda", "nccl")  # or said below
_STARTERS = ("deepspeed", "accelerate", "torchrun", "srun", "mpirun")
_EXTRA = re.compile(r"""^([A-Za-z0-9_.-]+).*extra\s*==\s*['"]([\w-]+)['"]""")


def machine() -> dict[str, Any]:
    """JSON-ready facts by subject.

    Raises:
        ConfigErrors: DS_ACCELERATOR names neither cuda nor cpu.
    """
    device = device_type()
    found = {k: v for k, v in environment(LaunchEnv(), device).items() if k not in _RUN}
    return found | {
        "device": device,
        "gpus": [gpu_facts(i) for i in range(torch.cuda.device_count())] if device == "cuda" else [],
        "torch": {"version": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl_version()},
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "collectives": _collectives(),
        "precisions": {
            name: "not on a CPU" if name == "fp16" and device == "cpu" else "usable" for name in DTYPES
        },
        "attention_kernels": {
            name: list(available_kernels(torch.device(device), dtype, HEAD_SIZE)) for name, dtype in DTYPES.items()
        },
        "launchers": {name: _starter(name) for name in _STARTERS},
        "extras": extras(),
        "deepspeed_ops": usable_ops(),
    }  # fmt: skip


def _collectives() -> dict[str, str]:
    reason = unavailable()
    free = shutil.disk_usage(FOLDER).free / GIB if os.path.isdir(FOLDER) else 0.0
    shm = f"usable, {free:.1f} GiB free in {FOLDER}" if reason is None else f"not usable: {reason}"
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available() and torch.cuda.is_available()}
    return {"shm": shm, **{name: "usable" if here else "not usable" for name, here in there.items()}}


def _starter(name: str) -> str | None:
    """Where a launcher is: beside this Python first, as `hybrid5d train` starts it."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.is_file() else shutil.which(name)


def extras() -> dict[str, str]:
    """The package's optional parts: installed, or what is missing."""
    missing: dict[str, list[str]] = {}
    try:
        requirements = metadata.requires("hybrid5d") or []
    except metadata.PackageNotFoundError:
        return {}
    for match in filter(None, map(_EXTRA.match, requirements)):
        package, extra = match.groups()
        absent = missing.setdefault(extra, [])
        if package_version(package) is None:
            absent.append(package)
    return {extra: f"missing: {', '.join(absent)}" if absent else "installed" for extra, absent in missing.items()}
