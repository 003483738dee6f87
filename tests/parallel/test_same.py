"""Hosts that were started with different settings, versions or data are refused on every rank, by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch.distributed as dist

from hybrid5d.errors import ConfigErrors
from hybrid5d.parallel.same import compare, differences, flat
from tests.launch_kit import REPO, TP2, free_port, write_run


def told(*facts: dict[str, Any]) -> list[str]:
    """What `compare` raises on each of as many ranks, two a host."""
    store, found = dist.HashStore(), [""] * len(facts)

    def rank(number: int) -> None:
        try:
            compare(store, number, len(facts), facts[number], f"host{number // 2}")
        except ConfigErrors as exc:
            found[number] = str(exc)

    ranks = [Thread(target=rank, args=(r,)) for r in range(len(facts))]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(30)
    return found


def test_a_difference_is_told_to_all_with_hosts_and_ranks() -> None:
    one = {"lr": 1e-2, "paths": ["a"], "tp": 2}
    assert told(one, dict(one), dict(one), dict(one)) == [""] * 4
    other = {**one, "lr": 3e-3}
    lines = told(one, one, other, other)
    assert len(set(lines)) == 1
    rule = "differs between ranks: 0.01 on host0 (ranks 0 to 1), 0.003 on host1 (ranks 2 to 3)"
    assert lines[0] == f"lr=0.01: {rule}. Fix: start all hosts with the same"


def test_odd_ranks_missing_facts_and_many_differences() -> None:
    one: dict[str, Any] = {"a": 1, "b": None}
    (error,) = differences([("h", one), ("h", {"a": 2, "b": None}), ("h", one), ("g", {"a": 2, "b": None})])
    assert "1 on h (ranks 0, 2), 2 on h (rank 1) and g (rank 3)" in error.rule
    (error,) = differences([("h", {}), ("h", {"x": True})])
    assert error.key == "x" and "null on h (rank 0), true on h (rank 1)" in error.rule
    many = differences([("h", {}), ("h", {f"k{i}": i for i in range(30)})])
    assert len(many) == 9 and "and 22 more that differ: k8, k9" in str(many[-1])


def test_flat_names_leaves() -> None:
    assert dict(flat({"a": {"b": 1, "c": {"d": [1, {"x": 2}]}}, "e": None})) == {
        "a.b": 1, "a.c.d": [1, {"x": 2}], "e": None,
    }  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("what", ["yaml", "data"])
def test_two_hosts_with_different_files_end_at_the_start(tmp_path: Path, what: str) -> None:
    """Two starts of one rank each, as `torchrun --nnodes 2` makes them: another lr, or one other token."""
    path = write_run(tmp_path / "a")  # names a data.cache_dir: a cache that both share
    other = path
    if what == "yaml":
        other = path.with_name("other.yaml")
        other.write_text(path.read_text().replace("lr: 0.01", "lr: 0.003"))
        assert other.read_text() != path.read_text()
    port, ranks = str(free_port()), []
    for rank, yaml in enumerate((path, other)):
        (own := tmp_path / str(rank)).mkdir()
        environ = {
            "RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "DS_ACCELERATOR": "cpu", "TMPDIR": own, "PATH": "",
        }  # fmt: skip
        words = [sys.executable, "-m", "hybrid5d.worker", "--config", str(yaml), TP2]
        if what == "data" and rank == 1:
            rows = [json.loads(line) for line in (tmp_path / "a" / "rows.jsonl").read_text().splitlines()]
            rows[3]["input_ids"][0] ^= 1
            (tmp_path / "a" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
        ranks.append(subprocess.Popen(
            words, env={k: str(v) for k, v in environ.items()}, text=True, cwd=REPO, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ))  # fmt: skip
        if what == "data" and rank == 0:
            assert ranks[0].stdout is not None and "hybrid5d" in ranks[0].stdout.readline()  # it has read its rows
    texts = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], texts
    key = "actor.optim.lr=0.01: " if what == "yaml" else "data.train_data_paths: hash of the tokens="
    assert len(texts[0].splitlines()) == 1 and texts[0].startswith(key) and "(rank 1)" in texts[0]
    assert texts[1].startswith(f"[rank 1] {key}") and len(texts[1].splitlines()) == 1  # its host has no other word
    assert not (tmp_path / "a" / "run" / "metrics.jsonl").exists()
