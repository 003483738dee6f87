"""Joining the job: which backend the groups have, and how long a rank waits for another one."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybrid5d.engine.build import initialize
from hybrid5d.load import load_config
from hybrid5d.plan.run import build_plan
from tests.config_kit import native, write_model, write_yaml
from tests.harness import run_ranks

TIMEOUT = 0.03  # minutes


def _join_as_launched(rank: int, port: int, path: Path) -> list[dist.ProcessGroup]:
    """As under a launcher: no group is there, the environment says where to meet. The job's groups of two ranks."""
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    engine = initialize(build_plan(load_config(path), 2))
    assert dist.group.WORLD is not None
    return [dist.group.WORLD, engine.ctx.tp.group, dist.new_group([0, 1])]


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


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _run(tmp_path: Path, backend: str) -> Path:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    changes = {
        "data__train_data_paths": [str(tmp_path / "rows.jsonl")],
        "runner__cpu_backend": backend,
        "actor__model__tensor_model_parallel_size": 2,
        "actor__model__model_path": str(write_model(tmp_path / "model")),
        "actor__megatron__distributed_timeout_minutes": TIMEOUT,
    }
    return write_yaml(tmp_path / "run.yaml", native(**changes))


@pytest.mark.parametrize("backend, made", [("gloo", "gloo"), ("shm", "shm"), ("auto", "shm_or_gloo")])
def test_groups_have_the_backend_and_the_timeout_of_the_run(tmp_path: Path, backend: str, made: str) -> None:
    """A rank calls a collective that the other one never does: in the default group, TP's, and one made later."""
    path = _run(tmp_path, backend)
    waited = run_ranks(2, _one_waits, _free_port(), path, tmp_path / "done")[0]
    assert [name for name, _ in waited] == [made] * 3
    for _, seconds in waited:
        assert 60 * TIMEOUT * 0.9 < seconds < 60 * TIMEOUT + 3  # the machine may be busy; the default is ten minutes
