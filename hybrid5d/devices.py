"""Which devices a process may use, and its place among the ranks, as environment variables say it. No torch.

CUDA_VISIBLE_DEVICES holds numbers, UUIDs (GPU-..., MIG-...), or nothing: no device. Launchers set RANK, WORLD_SIZE,
LOCAL_RANK and LOCAL_WORLD_SIZE; `srun` and Open MPI's `mpirun` set variables of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hybrid5d.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
_PORTS, _FIRST_PORT = 20_000, 15_000  # a job's own port: below the range that systems give to outgoing connections
_MPI = "OMPI_COMM_WORLD_"


def visible_devices(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Entries of CUDA_VISIBLE_DEVICES that CUDA takes: those before the first invalid one. None: it is not set."""
    if VISIBLE not in environ:
        return None
    result: list[str] = []
    for entry in environ[VISIBLE].split(","):
        word = entry.strip()
        if not (word.isdigit() or word.startswith(("GPU-", "MIG-"))):
            break
        result.append(word)
    return tuple(result)


def wants_cpu(environ: Mapping[str, str]) -> bool:
    """The user hid every device, or named the CPU."""
    return environ.get("DS_ACCELERATOR") == "cpu" or visible_devices(environ) == ()


def accelerator_faults(environ: Mapping[str, str], gpu_is_here: bool) -> list[ConfigError]:
    """A DS_ACCELERATOR that nothing here can run on; DeepSpeed would say it in a traceback."""
    name = environ.get("DS_ACCELERATOR")
    if name not in (None, "cuda", "cpu"):
        return [ConfigError("DS_ACCELERATOR", name, "hybrid5d runs on cuda and cpu", "set it to one of them")]
    if name == "cuda" and not gpu_is_here:
        return [ConfigError("DS_ACCELERATOR", name, "this machine has no GPU device file", "unset it, or set cpu")]
    return []


def too_few_devices(environ: Mapping[str, str], ranks: int) -> list[ConfigError]:
    """More ranks on this machine than devices that CUDA_VISIBLE_DEVICES names."""
    visible = visible_devices(environ)
    if not visible or wants_cpu(environ) or ranks <= len(visible):
        return []
    rule = f"{ranks} ranks, but {VISIBLE} names {len(visible)} devices ({environ[VISIBLE]}); a rank has one of its own"
    return [ConfigError("--num-procs", ranks, rule, f"start {len(visible)}, or name {ranks} devices")]


def started_by(environ: Mapping[str, str]) -> str:
    """deepspeed, accelerate, torchrun, srun, mpirun, or python (one process, or a launcher unknown here).

    Inside a job of SLURM or Open MPI the other launchers may start the ranks; their variables win.
    """
    if environ.get("ACCELERATE_USE_DEEPSPEED") or environ.get("ACCELERATE_MIXED_PRECISION"):
        return "accelerate" if "RANK" in environ else "python"
    if "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun"
    if "CROSS_RANK" in environ:
        return "deepspeed"
    if f"{_MPI}RANK" in environ and environ.get("RANK", environ[f"{_MPI}RANK"]) == environ[f"{_MPI}RANK"]:
        return "mpirun"
    step = "SLURM_STEP_NUM_TASKS" in environ and "SLURM_PROCID" in environ
    return "srun" if step and environ.get("RANK", environ["SLURM_PROCID"]) == environ["SLURM_PROCID"] else "python"


def scheduler_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What `srun` or `mpirun` say, in the names that torch reads; nothing where another launcher started the process.

    Values that are set already stay, and so are not among them.
    """
    kind = started_by(environ)
    if kind == "srun":
        result = _slurm(environ)
    elif kind == "mpirun":
        names = {"RANK": "RANK", "WORLD_SIZE": "SIZE", "LOCAL_RANK": "LOCAL_RANK", "LOCAL_WORLD_SIZE": "LOCAL_SIZE"}
        result = {name: environ[_MPI + theirs] for name, theirs in names.items() if _MPI + theirs in environ}
        if result.get("LOCAL_WORLD_SIZE") == result.get("WORLD_SIZE"):  # one node
            result["MASTER_ADDR"] = "127.0.0.1"
        result["MASTER_PORT"] = "29500"  # torch's own choice where nobody names one
    else:
        return {}
    return {name: value for name, value in result.items() if name not in environ}


def _slurm(environ: Mapping[str, str]) -> dict[str, str]:
    result = {"RANK": environ["SLURM_PROCID"], "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"]}
    if "SLURM_LOCALID" in environ:
        result["LOCAL_RANK"] = environ["SLURM_LOCALID"]
    counts = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = environ.get("SLURM_NODEID", "0")
    if node.isdigit() and int(node) < len(counts):
        result["LOCAL_WORLD_SIZE"] = str(counts[int(node)])
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    if nodes:
        result["MASTER_ADDR"] = first_node(nodes)
    job = f"{environ.get('SLURM_JOB_ID', '0')}{environ.get('SLURM_STEP_ID', '')}"
    result["MASTER_PORT"] = str(_FIRST_PORT + int(re.sub(r"\D", "", job) or 0) % _PORTS)
    return result


def first_node(nodes: str) -> str:
    """The first host of SLURM's compressed list: `gpu[003-007,9],login1` -> `gpu003`; brackets may come repeatedly."""
    depth, head = 0, ""
    for letter in nodes:
        if letter == "," and not depth:
            break
        depth += {"[": 1, "]": -1}.get(letter, 0)
        head += letter
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", head)


def tasks_per_node(counts: str) -> list[int]:
    """SLURM's run lengths: `8(x2),4` -> [8, 8, 4]."""
    result: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        result += [int(count)] * int(times or 1)
    return result


def device_index(environ: Mapping[str, str], count: int) -> int | ConfigError:
    """Which of the `count` devices that this process sees is its own, or why it has none.

    LOCAL_RANK is the index. Where a scheduler shows each task one device only, that is number 0 for all of them.
    """
    local = int(environ.get("LOCAL_RANK") or 0)
    here = int(environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE") or local + 1)
    if count == 1 and started_by(environ) in ("srun", "mpirun"):
        return 0
    if max(here, local + 1) <= count:
        return local
    visible = f" ({VISIBLE}={environ[VISIBLE]})" if VISIBLE in environ else ""
    rule = f"{max(here, local + 1)} ranks on this node, but {count} CUDA devices are visible{visible}"
    fix = f"start {count} ranks a node: every rank needs a device of its own" if count else "set DS_ACCELERATOR=cpu"
    return ConfigError("LOCAL_RANK", local, rule, fix)
