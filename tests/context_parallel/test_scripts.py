"""The attention example and benchmark run as they are called."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENV = dict(os.environ, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_example():
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4")
    lines = run(*launch, "examples/long_attention.py", "1024").splitlines()
    assert sorted(line.split(":")[0] for line in lines) == [f"rank {r}" for r in range(4)]
    assert "rank 0: 256 of 1024 tokens, from 0 to 1023" in "\n".join(lines)


@pytest.mark.full
def test_benchmark():
    out = run(sys.executable, "benchmarks/attention.py", "--lengths", "256", "--rounds", "1", "--kv-heads", "2")
    for method in ("single", "ring", "all_gather", "ulysses"):
        assert f"256 {method}" in out
