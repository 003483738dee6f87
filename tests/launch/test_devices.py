"""What ranks see of CUDA_VISIBLE_DEVICES under each launcher; devices and ranks that do not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid5d.errors import ConfigError, ConfigErrors
from hybrid5d.launch import start
from hybrid5d.launch.env import LaunchEnv, settle_environment
from tests.launch_kit import BIN, REPO, free_port

UUIDS = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,MIG-1c2d3e4f-0000-1111-2222-333344445555"
RANK_VARIABLES = ("SLURM_", "OMPI_", "LOCAL_", "RANK", "WORLD_SIZE", "MASTER_", "CUDA_VISIBLE", "OMP_NUM_THREADS")
CASES = ("4,5", UUIDS, "", None)


@pytest.fixture(autouse=True)
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests' engines left of a rank's variables in this process (LOCAL_RANK) is no launcher's word."""
    for name in [n for n in os.environ if n.startswith(RANK_VARIABLES)]:
        monkeypatch.delenv(name)


def ranks_saw(words: list[str], folder: Path, devices: str | None, **environ: str) -> list[dict[str, Any]]:
    """Start a launcher with the module that tells its environment; what each rank told."""
    base = {k: v for k, v in os.environ.items() if not k.startswith(RANK_VARIABLES)}
    shown = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    base |= {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(REPO)}  # the launcher counts CPUs; what it sets is the same
    folder.mkdir(exist_ok=True)
    done = subprocess.run([*words, str(folder)], env={**base, **shown, **environ}, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    seen = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    print(f"{' '.join(words[:4])} CUDA_VISIBLE_DEVICES={devices}: {seen}")
    return seen


@pytest.mark.parametrize("devices", CASES)
def test_the_verb_passes_the_devices_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: str | None) -> None:
    """`hybrid5d train` starts deepspeed so that ranks share what the user named, or nothing."""
    monkeypatch.setattr(start, "WORKER", "tests.launch.print_env")
    if devices is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    seen = ranks_saw(start.command("deepspeed", 2), tmp_path, devices)
    wanted = {None: "0,1", "": "-1,-1"}.get(devices, devices)
    assert [s["CUDA_VISIBLE_DEVICES"] for s in seen] == [wanted] * 2
    assert [(s["RANK"], s["LOCAL_RANK"], s["launcher"]) for s in seen] == [
        ("0", "0", "deepspeed"), ("1", "1", "deepspeed"),
    ]  # fmt: skip
    if devices:
        assert [s["index"] for s in seen] == ["0", "1"]


@pytest.mark.parametrize("devices", ["4,5", pytest.param("", marks=pytest.mark.full)])
def test_torchrun_and_accelerate_leave_the_devices_alone(tmp_path: Path, devices: str) -> None:
    module = ["--module", "tests.launch.print_env"]
    torchrun = [str(BIN / "torchrun"), "--nproc_per_node", "2", "--master_port", str(free_port())]
    seen = ranks_saw([*torchrun, *module], tmp_path / "torchrun", devices)
    assert [s["CUDA_VISIBLE_DEVICES"] for s in seen] == [devices] * 2
    accelerate = [str(BIN / "accelerate"), "launch", "--use_deepspeed", "--num_processes", "2"]
    accelerate += ["--main_process_port", str(free_port())]
    seen = ranks_saw([*accelerate, *module], tmp_path / "accelerate", devices)
    assert [(s["CUDA_VISIBLE_DEVICES"], s["launcher"]) for s in seen] == [(devices, "accelerate")] * 2


SRUN = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip


def test_tasks_of_srun_are_ranks(tmp_path: Path) -> None:
    """Each task started as srun does: no RANK, one GPU or all GPUs of the node shown."""
    words = [sys.executable, "-m", "tests.launch.print_env"]
    for task in range(4):
        place = {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task % 2), "SLURM_NODEID": str(task // 2)}
        (seen,) = ranks_saw(words, tmp_path / str(task), str(task % 2), **SRUN, **place)
        told = (seen["RANK"], seen["WORLD_SIZE"], seen["LOCAL_RANK"], seen["LOCAL_WORLD_SIZE"], seen["launcher"])
        assert told == (str(task), "4", str(task % 2), "2", "srun")
        assert seen["index"] == "0", "one device a task: its number is 0"
        (seen,) = ranks_saw(words, tmp_path / f"all-{task}", "0,1", **SRUN, **place)
        assert seen["index"] == str(task % 2)


def test_the_verb_gives_ranks_their_share_of_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "usable_cores", lambda: 96)
    words = [sys.executable, "-c", "import os; open(os.environ['OUT'], 'w').write(os.environ['OMP_NUM_THREADS'])", "."]
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    assert start._run(words, 8, 1.0, threading.Event()) == 0
    assert (tmp_path / "out").read_text() == "12"


@pytest.mark.parametrize("devices, ranks, refused", [("4,5", 3, True), ("4,5", 2, False), ("", 3, False)])
def test_more_ranks_than_named_devices_are_refused(
    monkeypatch: pytest.MonkeyPatch, devices: str, ranks: int, refused: bool
) -> None:
    """Before anything starts; no devices at all mean the CPU, which has room for any number."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    errors = start._launcher_faults(None, ranks)
    assert [("3 ranks" in str(e), "names 2 devices (4,5)" in str(e)) for e in errors] == [(True, True)] * refused


@pytest.mark.parametrize(
    ("name", "gpu", "rule"),
    [("xpu", True, "on cuda and cpu"), ("cuda", False, "no GPU device file"), ("cuda", True, ""), ("cpu", False, "")],
)
def test_an_accelerator_that_is_not_here_is_refused_before_the_launcher(
    monkeypatch: pytest.MonkeyPatch, name: str, gpu: bool, rule: str
) -> None:
    monkeypatch.setattr(start, "_gpu_is_here", lambda: gpu)
    monkeypatch.setenv("DS_ACCELERATOR", name)
    errors = start._launcher_faults(None, 2)
    assert [(e.key, e.value, rule in e.rule) for e in errors] == [("DS_ACCELERATOR", name, True)] * bool(rule)


class FakeCuda:
    """torch.cuda of a machine with `count` devices, as far as taking one needs it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, accelerator: str = "cuda"):
        import deepspeed.accelerator as package
        import torch

        self.taken: list[int] = []
        monkeypatch.setattr(package, "get_accelerator", lambda: SimpleNamespace(_name=accelerator))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "set_device", self.taken.append)


def taken(monkeypatch: pytest.MonkeyPatch, count: int, accelerator: str = "cuda", **environ: str) -> Any:
    """What `take_device` takes with that environment and so many devices: a list, or why not."""
    from hybrid5d.engine.deepspeed.distributed import take_device

    for name in [n for n in os.environ if n.startswith(RANK_VARIABLES)]:
        monkeypatch.delenv(name)  # what an earlier call set
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    cuda = FakeCuda(monkeypatch, count, accelerator)
    try:
        take_device()
    except ConfigErrors as exc:
        return str(exc)
    return cuda.taken


def test_a_rank_takes_its_device_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    world = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    assert taken(monkeypatch, 8, **world) == [1]
    told = taken(monkeypatch, 7, **world, CUDA_VISIBLE_DEVICES="0,1,2,3,4,5,6")
    assert "8 ranks on this node, but 7 CUDA devices are visible (CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6)" in told
    assert "LOCAL_RANK='1'" in told or "LOCAL_RANK=1" in told
    assert "0 CUDA devices" in taken(monkeypatch, 0, **world)
    assert "2 ranks" in taken(monkeypatch, 1, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1"), "a lone GPU under torchrun"


def test_one_visible_device_a_task_is_number_0(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", **SRUN}
    environ: dict[str, str] = dict(place)
    settle_environment(LaunchEnv.read(environ), environ)
    assert (environ["RANK"], environ["WORLD_SIZE"], environ["LOCAL_RANK"]) == ("3", "4", "1")
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("gpu07", str(15000 + 47110 % 20000))
    assert taken(monkeypatch, 1, **environ) == [0]
    assert os.environ["LOCAL_RANK"] == "0", "DeepSpeed puts the module on the device of that number"
    mpi = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3",
           "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}  # fmt: skip
    environ = dict(mpi)
    env = LaunchEnv.read(environ)
    assert (env.rank, env.world_size, env.local_rank, env.local_world_size, env.launcher) == (3, 4, 3, 4, "mpirun")
    settle_environment(env, environ)
    assert environ["MASTER_ADDR"] == "127.0.0.1" and taken(monkeypatch, 1, **environ) == [0]
    assert os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] == "0", "DeepSpeed asserts that the two are equal"


@pytest.mark.parametrize(
    "environ, launcher, world",
    [
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}, "python", 1),  # inside sbatch, no step
        ({**SRUN, "SLURM_PROCID": "1", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "5",
          "TORCHELASTIC_RUN_ID": "x"}, "torchrun", 8),
        ({**SRUN, "SLURM_PROCID": "1", "RANK": "1", "WORLD_SIZE": "4"}, "srun", 4),  # RANK=$SLURM_PROCID by hand
    ],
)  # fmt: skip
def test_only_a_task_of_srun_is_a_rank(environ: dict[str, str], launcher: str, world: int) -> None:
    env = LaunchEnv.read(environ)
    assert (env.launcher, env.world_size) == (launcher, world)


def test_what_is_set_already_stays() -> None:
    environ = {**SRUN, "SLURM_PROCID": "1", "SLURM_NODEID": "0", "MASTER_PORT": "4242", "LOCAL_RANK": "0"}
    env = LaunchEnv.read(environ)
    settle_environment(env, environ)
    assert (env.rank, environ["LOCAL_RANK"], environ["MASTER_ADDR"]) == (1, "0", "gpu07")
    assert environ["MASTER_PORT"] == "4242"


def test_deepspeeds_accelerator_is_the_only_word_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """DS_ACCELERATOR=cpu on a machine with GPUs: everything is on the CPU, gradient modes included."""
    import torch

    from hybrid5d.engine.deepspeed.distributed import current_device, device_type
    from hybrid5d.engine.step import own_modes

    assert taken(monkeypatch, 4, "cpu", LOCAL_RANK="0") == []
    assert (current_device(), device_type()) == (torch.device("cpu"), "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("cpu")
        with own_modes():
            assert not torch.is_autocast_enabled("cpu")
    assert "DS_ACCELERATOR='xpu'" in str(taken(monkeypatch, 4, "xpu"))


def test_uuids_keep_deepspeed_from_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed reads the variable as numbers to ask NVML, and fails on UUIDs (ZeRO 2, fp32, fp16, offload)."""
    from deepspeed.accelerator import cuda_accelerator

    accelerator = object.__new__(cuda_accelerator.CUDA_Accelerator)
    with pytest.raises(ValueError):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", UUIDS)
        accelerator._get_nvml_gpu_id(0)
    monkeypatch.setattr(cuda_accelerator, "pynvml", SimpleNamespace())
    taken(monkeypatch, 2, LOCAL_RANK="0", CUDA_VISIBLE_DEVICES="0,1")
    assert cuda_accelerator.pynvml is not None
    taken(monkeypatch, 2, LOCAL_RANK="0", CUDA_VISIBLE_DEVICES=UUIDS)
    monkeypatch.setattr(accelerator, "total_memory", lambda index: 80, raising=False)
    monkeypatch.setattr(accelerator, "memory_allocated", lambda index: 30, raising=False)
    assert accelerator.available_memory(0) == 50


def test_slurms_lists() -> None:
    from hybrid5d.devices import first_node, tasks_per_node

    lists = {"gpu[003-007,9],login1": "gpu003", "n1": "n1", "a-[1,3]b[2-4],c": "a-1b2", "x7,x8": "x7"}
    assert {text: first_node(text) for text in lists} == lists
    assert tasks_per_node("8(x2),4") == [8, 8, 4] and tasks_per_node("") == []


def test_a_fault_of_the_device_is_a_refusal() -> None:
    from hybrid5d.devices import device_index

    found = device_index({"LOCAL_RANK": "3"}, 2)
    assert isinstance(found, ConfigError) and "start 2 ranks a node" in found.fix
