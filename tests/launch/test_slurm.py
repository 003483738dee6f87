"""examples/slurm.sbatch: what it asks for, what srun is given, and what its tasks make of their environment."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from hybrid5d.devices import device_index
from hybrid5d.launch.env import LaunchEnv, settle_environment
from tests.launch_kit import REPO

SCRIPT = REPO / "examples" / "slurm.sbatch"


def _asked() -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE))


def test_a_task_a_gpu() -> None:
    asked = _asked()
    assert asked["ntasks-per-node"] == asked["gpus-per-node"] == "8" and asked["nodes"] == "2"
    assert asked["signal"] == "TERM@120", "to the tasks, not to the script alone (which B: would mean)"


def test_what_srun_is_given(tmp_path: Path) -> None:
    """With an srun that writes down its words and the variables it would hand on."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/bash\nprintf "%s\\n" "$@" > "$OUT/words"\nenv > "$OUT/env"\n')
    srun.chmod(0o755)
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path), "SLURM_SUBMIT_DIR": str(REPO),
        "SLURM_CPUS_PER_TASK": _asked()["cpus-per-task"],
    }  # fmt: skip
    words = ["bash", str(SCRIPT), "examples/quickstart.yaml", "runner.max_steps=3"]
    subprocess.run(words, env=environ, cwd=REPO, check=True, timeout=30)
    given = (tmp_path / "words").read_text().split("\n")[:-1]
    yaml = str(REPO / "examples/quickstart.yaml")
    assert given == [
        "--kill-on-bad-exit=1", "python", "examples/train.py", "--config", yaml, "runner.resume_dir=auto",
        "runner.max_steps=3",
    ]  # fmt: skip
    assert (REPO / given[2]).exists() and "OMP_NUM_THREADS=12" in (tmp_path / "env").read_text()
    refused = subprocess.run(["bash", str(SCRIPT)], env=environ, cwd=REPO, capture_output=True, text=True, timeout=30)
    assert refused.returncode and "name a YAML" in refused.stderr


def test_its_tasks_are_sixteen_ranks_that_meet() -> None:
    ranks, meeting = set(), set()
    for task in range(16):
        environ = {
            "SLURM_JOB_ID": "991", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": str(task),
            "SLURM_LOCALID": str(task % 8), "SLURM_NODEID": str(task // 8), "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
            "SLURM_STEP_NODELIST": "gpu[011-012]",
        }  # fmt: skip
        env = LaunchEnv.read(environ)
        settle_environment(env, environ)
        assert (env.launcher, env.world_size, env.local_world_size) == ("srun", 16, 8)
        assert device_index(environ, 8) == task % 8
        ranks.add(int(environ["RANK"]))
        meeting.add((environ["MASTER_ADDR"], environ["MASTER_PORT"]))
    assert ranks == set(range(16)) and len(meeting) == 1 and meeting.pop()[0] == "gpu011"
