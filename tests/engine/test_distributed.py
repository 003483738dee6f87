"""Joining the job: which backend the groups have, and how long a rank waits for another one."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from hybrid5d.engine.build import initialize
from hybrid5d.errors import ConfigErrors
from hybrid5d.load import load_config
from hybrid5d.plan.run import build_plan
from tests.config_kit import native, write_model, write_yaml
from tests.harness import run_ranks
from tests.kit import MODELS, save_model
from tests.launch_kit import free_port

TIMEOUT = 0.05  # minutes; the ranks meet within it, too


def _join_as_launched(rank: int, port: int, path: Path) -> list[dist.ProcessGroup]:
    """As under a launcher: no group is there, the environment says where to meet. The job's groups of two ranks."""
    os.environ["MASTER_PORT"] = str(port)
    plan = build_plan(load_config(path), 2)
    dist.barrier()
    dist.destroy_process_group()
    engine = initialize(plan)
    assert dist.group.WORLD is not None
    return [dist.group.WORLD, engine.ctx.tp.group]


def _one_waits(rank: int, port: int, path: Path, done: Path) -> list[tuple[str, float]]:
    groups, waited = _join_as_launched(rank, port, path), list[tuple[str, float]]()
    if rank == 0:
        for group in groups:
            begin = time.monotonic()
            with pytest.raises(RuntimeError, match=r"(?i)time.?d? ?out"):
                dist.all_reduce(torch.ones(3), group=group)
            waited.append((dist.get_backend(group), time.monotonic() - begin))
        done.touch()
    while not done.exists():
        time.sleep(0.05)
    return waited


PPO = {
    "runner__task_type": "reasoning", "data__type": "rollouts", "data__rollout_batch_size": 2,
    "algorithm": {"adv_type": "gae", "group_size": 1}, "runner__val_check_interval": -1,
    "critic": {"use_critic_model": True, "model": {"model_path": "critic"}},
}  # fmt: skip


def _run(tmp_path: Path, backend: str, timeout: float, more: Mapping[str, Any] = {}, **model: Any) -> Path:
    """A YAML; `model`: other keys of actor.model, else a folder is made."""
    (tmp_path / "rows.jsonl").write_text("{}\n")
    changes = {
        "data__train_data_paths": ["rows.jsonl" if model else str(tmp_path / "rows.jsonl")],
        "runner__cpu_backend": backend,
        "actor__model__tensor_model_parallel_size": 2,
        "actor__megatron__distributed_timeout_minutes": timeout,
        **{f"actor__model__{k}": v for k, v in (model or {"model_path": str(write_model(tmp_path / "model"))}).items()},
    }
    return write_yaml(tmp_path / "run.yaml", native(**changes, **more))


@pytest.mark.parametrize("backend, made", [("gloo", "gloo"), ("shm", "shm"), ("auto", "shm_or_gloo")])
def test_groups_have_the_backend_and_the_timeout_of_the_run(tmp_path: Path, backend: str, made: str) -> None:
    """A rank calls a collective that the other one never does: in the default group and in TP's, made later."""
    path = _run(tmp_path, backend, TIMEOUT)
    waited = run_ranks(2, _one_waits, free_port(), path, tmp_path / "done")[0]
    assert [name for name, _ in waited] == [made] * 2
    for _, seconds in waited:
        assert 60 * TIMEOUT * 0.9 < seconds < 60  # the default is ten minutes


def _with_its_own_folder(rank: int, port: int, folders: list[Path]) -> list[str]:
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    os.chdir(folders[rank])
    plan = build_plan(load_config("run.yaml"), 2)
    with pytest.raises(ConfigErrors) as caught:
        initialize(plan)
    return [str(error) for error in caught.value.errors]


@pytest.mark.parametrize("of", ["actor", "critic"])
@pytest.mark.parametrize("what", ["hash of config.json", "bytes of weights"])
def test_hosts_whose_model_folders_differ_are_refused(tmp_path: Path, what: str, of: str) -> None:
    """One path, two file systems: each rank stands in a folder of its own."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        save_model(MODELS["llama"], folder / "model")
        save_model(MODELS["llama"], folder / "critic")
        _run(folder, "shm", 1.0, PPO if of == "critic" else {}, model_path="model", load_weights=True)
    name = "model" if of == "actor" else "critic"
    file = folders[1] / name / "config.json"
    if what == "hash of config.json":
        file.write_text(json.dumps({**json.loads(file.read_text()), "rms_norm_eps": 1e-3}))
    else:
        weights = next((folders[1] / name).glob("*.safetensors"))
        save_file(load_file(weights), weights, {"format": "pt", "note": "another download"})
    for errors in run_ranks(2, _with_its_own_folder, free_port(), folders):
        assert [f"{of}.model.model_path: {what}" in error for error in errors] == [True], errors
