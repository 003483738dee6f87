"""benchmarks/axes.py: every peer's losses and norms are the plain loop's; who fails is listed, not ranked."""

import importlib
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.harness import run_ranks

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import axes  # noqa: E402
import report  # noqa: E402
from peers import PEERS  # noqa: E402
from sides import Side, SideFailed  # noqa: E402

SHAPE = axes.Shape(rows=6, length=24)
STEPS = 3


def rows():
    return axes.rows_of(axes.QUICK["vocab_size"], SHAPE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("model"))
    axes.save_model(folder, axes.QUICK)
    return folder


@pytest.fixture(scope="module")
def plain(folder):
    step = axes.plain_step(folder, rows())
    return [step() for _ in range(STEPS)]


def peer_steps(rank, folder, name):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    module = importlib.import_module(f"peers.{PEERS[name].module}")
    step = module.build(folder, PEERS[name].variant, torch.from_numpy(rows()))
    return [step() for _ in range(STEPS)]


def installed(name):
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


QUICK = {"torch-zero1"}


@pytest.mark.parametrize("name", [pytest.param(p, marks=() if p in QUICK else pytest.mark.full) for p in PEERS])
def test_a_peer_trains_as_the_plain_loop(folder, plain, name):
    if name.startswith("megatron") and not installed("megatron-core"):
        pytest.skip("megatron-core comes with `make benchmarks`")
    for of_rank in run_ranks(2, peer_steps, folder, name, backend="gloo"):
        for step, expected in zip(of_rank, plain, strict=True):
            assert step == pytest.approx(expected, rel=1e-5)


def test_every_peer_stands_in_a_table():
    assert sorted(p for axis in axes.AXES.values() for p in axis.peers) == sorted(PEERS)
    assert {name for axis in axes.AXES.values() for name in axis.ours} < set(axes.LAYOUTS)


class Fake:
    """A side whose steps are written down: (wall, cpu, loss), or an error."""

    def __init__(self, *steps):
        self.steps, self.stopped = list(steps), False

    def step(self):
        took = self.steps.pop(0)
        if isinstance(took, Exception):
            raise took
        wall, cpu, loss = took
        return {"wall": wall, "cpu": cpu, "faults": 1, "peak": 5.0, "value": [loss, 2.0]}

    def stop(self):
        self.stopped = True


def test_ratios_are_of_turns_of_one_round_and_failures_are_listed(monkeypatch):
    sides = {
        axes.PLAIN: Fake((9, 9, 1.0), (2, 4, 0.9), (4, 8, 0.8), (6, 12, 0.7)),
        "dp2": Fake((9, 9, 1.0), (1, 4, 0.9), (1, 4, 0.8), (2, 6, 0.7)),
        "torch-zero1": Fake((9, 9, 1.0), SideFailed("RuntimeError: no room")),
        "deepspeed-zero1": Fake((9, 9, 1.0), (1, 1, 0.9), (1, 1, 0.8002), (1, 1, 0.7)),
    }
    monkeypatch.setattr(axes, "start", lambda folder, name, shape, transport: sides[name])
    found = axes.compare("", axes.AXES["dp"], "gloo", 3, SHAPE)
    assert found["dp2"] == {
        "transport": "shm", "speed": 3, "speed_range": [2, 4], "cpu": 0.5, "cpu_range": [0.5, 1], "wall_s": 1,
        "cpu_s": 4, "peak_mb": 5, "faults": 1,
    }  # fmt: skip
    assert found[axes.PLAIN]["speed_range"] == [1, 1]
    assert found["torch-zero1"] == {"error": "RuntimeError: no room"}
    assert found["deepspeed-zero1"]["error"].startswith("loss and norm 0.8002, 2.0 instead of 0.8,")
    assert all(side.stopped for side in sides.values())


def test_a_side_of_ours_that_fails_ends_the_run(monkeypatch):
    sides = {axes.PLAIN: Fake((9, 9, 1.0)), "dp2": Fake(SideFailed("gone"))}
    monkeypatch.setattr(axes, "start", lambda folder, name, shape, transport: sides[name])
    with pytest.raises(SideFailed, match="gone"):
        axes.compare("", axes.AXES["dp"], "gloo", 1, SHAPE)


ONE_RANK_ENDS = """
import os, sys
sys.stdin.readline()
if os.environ["RANK"] == "1":
    sys.exit("ValueError: cannot go on")
import time; time.sleep(60)
"""


def test_a_rank_that_ends_fails_its_side_with_what_it_said():
    side = Side.start(["-c", ONE_RANK_ENDS], 2)
    try:
        with pytest.raises(SideFailed, match="ValueError: cannot go on"):
            side.step()
    finally:
        side.stop()


def test_a_file_of_results_keeps_other_axes(tmp_path):
    file, short = tmp_path / "results.json", axes.Shape(8, 512)
    for axis, on, shape in (("pp", "gloo", short), ("tp", "gloo", short), ("tp", "shm", short), ("tp", "gloo", SHAPE)):
        axes.keep(file, shape, {"axis": axis, "peers_on": on, "rounds": 1, "sides": {}})
    axes.keep(file, short, {"axis": "tp", "peers_on": "gloo", "rounds": 2, "sides": {}})
    runs = [SimpleNamespace(**r) for r in json.loads(file.read_text())["runs"]]
    assert [(r.axis, r.peers_on, r.shape["length"], r.rounds) for r in runs] == [
        ("tp", "gloo", 24, 1), ("tp", "gloo", 512, 2), ("tp", "shm", 512, 1), ("pp", "gloo", 512, 1),
    ]  # fmt: skip


def test_the_page_is_made_of_the_results(tmp_path):
    """Its tables are what report.py writes; a table names who did not run."""
    results = json.loads((ROOT / "benchmarks/results.json").read_text())
    assert report.tables(results) in (ROOT / "docs/performance.md").read_text()
    plain = {"speed": 1.0, "speed_range": [1, 1], "cpu": 1.0, "cpu_range": [1, 1], "peak_mb": 5, "faults": 7}
    sides = {
        "plain": {**plain, "transport": "none"},
        "dp2": {**plain, "transport": "shm", "speed": 1.2},
        "torch-zero1": {**plain, "transport": "gloo", "speed": 1.5, "peak_mb": 9},
        "deepspeed-zero1": {"error": "no room"},
    }
    machine = {"cores": 2, "torch": "2"}
    shape = {"rows": 8, "length": 512}
    run = {
        "axis": "dp",
        "peers_on": "gloo",
        "rounds": 3,
        "load": [0.5, 2.1],
        "shape": shape,
        "machine": machine,
        "sides": sides,
    }
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.write({"runs": [run, {**run, "peers_on": "shm"}]}, page)
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after") and "old" not in lines
    (aim,) = [line for line in lines if line.startswith("| DP, ZeRO 1 |")]
    assert aim.split(" | ")[1:6] == ["dp2", "1.200", "torch DDP + ZeroRedundancyOptimizer 1.500", "0.80", "1.00"]
    assert sum("did not run: no room" in line for line in lines) == 2


@pytest.mark.full
def test_the_command_runs(tmp_path):
    file = tmp_path / "results.json"
    words = ("--quick", "--axes", "dp", "--peers-on", "shm", "--json", str(file))
    run = subprocess.run(
        [sys.executable, "benchmarks/axes.py", *words], cwd=ROOT, env=os.environ, capture_output=True, text=True,
        timeout=280,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    sides = json.loads(file.read_text())["runs"][0]["sides"]
    assert {name: r["transport"] for name, r in sides.items()} == {
        "plain": "none", "dp2": "shm", "torch-zero1": "shm", "deepspeed-zero1": "shm",
    }  # fmt: skip
