"""What launchers say, and what is made of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid5d.errors import ConfigErrors
from hybrid5d.launch.env import (
    LaunchEnv,
    launcher_conflicts,
    launcher_notices,
    settle_environment,
    threads_per_rank,
    usable_cores,
)

RANK1 = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
TORCHRUN = {**RANK1, "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    "environ, launcher, here",
    [
        ({}, "python", 1),
        ({**RANK1, "CROSS_RANK": "0", "LOCAL_SIZE": "4"}, "deepspeed", 4),
        (TORCHRUN, "torchrun", 2),
        ({**TORCHRUN, "ACCELERATE_USE_DEEPSPEED": "true"}, "accelerate", 2),
        (RANK1, "python", 4),
    ],
)
def test_each_launcher_is_read(environ: dict[str, str], launcher: str, here: int) -> None:
    env = LaunchEnv.read(environ)
    assert (env.launcher, env.local_world_size) == (launcher, here)
    assert (env.rank, env.world_size) == ((1, 4) if environ else (0, 1))


def test_local_rank_may_come_as_a_word() -> None:
    environ = {k: v for k, v in RANK1.items() if k != "LOCAL_RANK"}
    assert LaunchEnv.read(environ, 1).local_rank == 1
    assert LaunchEnv.read(environ).local_rank == 1, "one node: the rank itself"


@pytest.mark.parametrize(
    "environ, local_rank, told",
    [
        ({"RANK": "0"}, None, "both RANK and WORLD_SIZE"),
        ({"RANK": "x", "WORLD_SIZE": "y"}, None, "WORLD_SIZE='y': not an integer"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, None, "not below WORLD_SIZE=4"),
        (RANK1, 0, "LOCAL_RANK=1"),
    ],
)
def test_contradictions_are_refused(environ: dict[str, str], local_rank: int | None, told: str) -> None:
    with pytest.raises(ConfigErrors, match=told):
        LaunchEnv.read(environ, local_rank)


def test_cores_are_shared_out_and_the_users_settings_stay() -> None:
    assert threads_per_rank(LaunchEnv()) == usable_cores()
    assert threads_per_rank(LaunchEnv(0, 1000, 0, 1000)) == 1
    environ = {"OMP_NUM_THREADS": "7"}
    settle_environment(LaunchEnv(3, 8, 3, 8), environ)
    assert environ["OMP_NUM_THREADS"] == "7" and environ["LOCAL_RANK"] == "3"
    fresh: dict[str, str] = {}
    settle_environment(LaunchEnv(0, 1000, 0, 1000), fresh)
    assert fresh["OMP_NUM_THREADS"] == "1"


def plan(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "precision": SimpleNamespace(dtype="bf16"), "zero_stage": 1, "clip_grad": 1.0, "deepspeed": {"a": 1, "b": 2},
        "batch": SimpleNamespace(gradient_accumulation_steps=4),
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


@pytest.mark.parametrize("asked, refused", [("no", False), ("bf16", False), ("fp16", True), ("fp8", True)])
def test_accelerates_precision_must_agree(asked: str, refused: bool) -> None:
    """Two places that disagree end in one refusal that names both."""
    errors = launcher_conflicts({"ACCELERATE_MIXED_PRECISION": asked}, plan())
    assert bool(errors) is refused
    if refused:
        assert asked in str(errors[0]) and "actor.model.precision='bf16'" in str(errors[0])


def test_accelerates_config_file_must_be_this_runs(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"a": 1, "b": 3, "c": 0}))
    environ = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}
    assert [e.key for e in launcher_conflicts(environ, plan())] == [f"{path}: b", f"{path}: c"]
    path.write_text(json.dumps({"a": 1, "b": 2}))
    assert launcher_conflicts(environ, plan()) == []
    path.write_text("{")
    assert "not JSON" in str(launcher_conflicts(environ, plan())[0])


def test_accelerates_numbers_that_differ_are_told() -> None:
    environ = {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "ACCELERATE_GRADIENT_CLIPPING": "1.0"}
    (notice,) = launcher_notices(environ, plan())
    assert "zero_stage=3 (the run's is 1)" in notice and "clipping" not in notice
    assert launcher_notices({}, plan()) == []
