"""What the launcher said: rank, world, threads, and settings of its own that could contradict the YAML. No torch.

`deepspeed`, `accelerate launch`, `torchrun`, `srun`, `mpirun` and plain `python` differ in the variables they set
(`hybrid5d.devices`); nothing above this module knows which of them started the process.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid5d.config.dtypes import precision
from hybrid5d.console import package_version
from hybrid5d.devices import scheduler_variables, started_by
from hybrid5d.errors import ConfigError, ConfigErrors
from hybrid5d.plan.deepspeed_keys import TRACKERS
from hybrid5d.plan.run import RunPlan

_INTEGERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True)
class LaunchEnv:
    """This process's place among the started ones.

    Attributes:
        rank, world_size: over all nodes. local_rank, local_world_size: on this node.
        launcher: deepspeed, accelerate, torchrun, srun, mpirun, or python (one process, or a launcher unknown here).
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: str = "python"

    @property
    def several_hosts(self) -> bool:
        """Whether ranks of this job run elsewhere."""
        return self.local_world_size < self.world_size

    @classmethod
    def read(cls, environ: Mapping[str, str], local_rank: int | None = None) -> LaunchEnv:
        """From the environment and the `--local_rank` word, if there was one.

        Raises:
            ConfigErrors: values that are no numbers, only half of them set, or two local ranks.
        """
        environ = {**environ, **scheduler_variables(environ)}
        values = _integers(environ)
        if ("RANK" in values) != ("WORLD_SIZE" in values):
            rule = "a launcher sets both RANK and WORLD_SIZE, and only one of them is set"
            raise ConfigErrors([ConfigError("environment", None, rule, "unset it, or start with a launcher")])
        rank, world = values.get("RANK", 0), values.get("WORLD_SIZE", 1)
        named = values.get("LOCAL_RANK")
        if named is not None and local_rank is not None and named != local_rank:
            rule = f"the environment says LOCAL_RANK={named}"
            raise ConfigErrors([ConfigError("--local_rank", local_rank, rule, "drop the word")])
        local = next(r for r in (named, local_rank, rank) if r is not None)
        here = int(environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE") or world)
        if not 0 <= rank < world:
            raise ConfigErrors([ConfigError("RANK", rank, f"not below WORLD_SIZE={world}", "start with a launcher")])
        return cls(rank, world, local, here, started_by(environ))


def _integers(environ: Mapping[str, str]) -> dict[str, int]:
    values, errors = {}, []
    for name in _INTEGERS:
        text = environ.get(name)
        if text is None:
            continue
        try:
            values[name] = int(text)
        except ValueError:
            errors.append(ConfigError(name, text, "not an integer", "unset it, or start with a launcher"))
    if errors:
        raise ConfigErrors(errors)
    return values


# --- threads and noise ----------------------------------------------------------------------------------------------


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_rank(env: LaunchEnv) -> int:
    """The node's cores shared out among its ranks, at least one each."""
    return max(1, usable_cores() // env.local_world_size)


def settle_environment(env: LaunchEnv, environ: MutableMapping[str, str]) -> None:
    """Defaults that libraries read while they are imported; what the user set stays. Call before torch is imported.

    The `deepspeed` launcher leaves OMP_NUM_THREADS unset, and N ranks with a thread per core each are several times
    slower than N ranks with their share. Waiting threads sleep instead of spinning on cores that other ranks need.
    """
    environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(env)))
    environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # c10d warns once per rank about what is not an error
    environ.setdefault("DS_LOG_LEVEL", "error")
    environ.update(scheduler_variables(environ))  # torch and DeepSpeed read RANK and the like
    environ["LOCAL_RANK"] = str(env.local_rank)  # some launchers give it as a word only


_PACKAGES = ("hybrid5d", "torch", "deepspeed", "numpy", "transformers", "accelerate", "safetensors", "flash-attn")
_VARIABLES = ("OMP_", "MKL_", "DS_", "NCCL_", "GLOO_", "ACCELERATE_", "CUDA_VISIBLE_DEVICES", "MASTER_", "TORCH")


def gpu_facts(index: int) -> dict[str, Any]:
    """Name, memory and compute capability of a visible GPU."""
    import torch

    about = torch.cuda.get_device_properties(index)
    return {
        "name": about.name, "memory_gib": round(about.total_memory / 2**30, 1),
        "capability": f"{about.major}.{about.minor}",
    }  # fmt: skip


def nccl_version() -> str | None:
    """NCCL's version where torch can use it."""
    import torch

    usable = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    return ".".join(map(str, torch.cuda.nccl.version())) if usable else None


def _gpu() -> dict[str, Any]:
    """This rank's GPU and what drives it."""
    import torch

    version = Path("/proc/driver/nvidia/version")
    return {
        "gpu": gpu_facts(torch.cuda.current_device()),
        "cuda": torch.version.cuda,
        "nccl": nccl_version(),
        "driver": version.read_text(encoding="utf-8").splitlines()[0] if version.exists() else None,
    }


def environment(env: LaunchEnv, device: str) -> dict[str, Any]:
    """Versions, machine, launcher and the variables that libraries read."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: found for name in _PACKAGES if (found := package_version(name)) is not None},
        "device": device,
        **(_gpu() if device.startswith("cuda") else {}),
        "cores": usable_cores(),
        "launcher": env.launcher,
        "world_size": env.world_size,
        "ranks_per_node": env.local_world_size,
        "command": sys.argv,
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
    }


# --- accelerate's own settings --------------------------------------------------------------------------------------


def launcher_conflicts(environ: Mapping[str, str], plan: RunPlan) -> list[ConfigError]:
    """Settings made on accelerate's side that contradict the YAML. The YAML decides; two answers are refused."""
    errors = []
    asked = environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    wanted = None if asked == "no" else precision(asked) or asked
    have = plan.precision.dtype
    if wanted is not None and wanted != have:
        rule = f"accelerate's --mixed_precision (ACCELERATE_MIXED_PRECISION) says {wanted}"
        fix = f"drop --mixed_precision, or actor.model.precision: {wanted}"
        errors.append(ConfigError("actor.model.precision", have, rule, fix))
    path = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if path:
        errors += _config_file_conflicts(path, plan.deepspeed)
    return errors


def _config_file_conflicts(path: str, ours: Mapping[str, Any]) -> list[ConfigError]:
    key = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
    try:
        with open(path, encoding="utf-8") as f:
            theirs = json.load(f)
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "strerror", None) or "not JSON"
        return [ConfigError(key, path, reason, "name the ds_config.json that `hybrid5d convert --out` wrote")]
    if not isinstance(theirs, dict):
        return [ConfigError(key, path, "not a JSON object", "name the ds_config.json that `hybrid5d convert` wrote")]
    fix = "convert the YAML again with the same overrides, or drop the file"
    return [
        ConfigError(f"{path}: {name}", theirs.get(name), f"the YAML gives {ours.get(name)!r}", fix)
        for name in sorted({*theirs, *ours} - TRACKERS)  # `convert` names trackers, in a run our metrics feed them
        if theirs.get(name) != ours.get(name)
    ]


def launcher_notices(environ: Mapping[str, str], plan: RunPlan) -> list[str]:
    """accelerate's numbers that are not used, where they differ from the run's."""
    differing = []
    for name, label, ours in (
        ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "zero_stage", plan.zero_stage),
        (
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
            "gradient_accumulation_steps",
            plan.batch.gradient_accumulation_steps,
        ),
        ("ACCELERATE_GRADIENT_CLIPPING", "gradient_clipping", plan.clip_grad),
    ):
        text = environ.get(name)
        if text not in (None, "", "none", "auto") and text != str(ours):
            differing.append(f"{label}={text} (the run's is {ours})")
    return [f"accelerate's own settings are not used, the YAML decides: {', '.join(differing)}"] if differing else []
