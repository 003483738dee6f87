"""The search over layouts: what it gives is legal, fits, is ordered; what it leaves out has a reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid5d.plan import job as jobs
from hybrid5d.plan.hardware import load_hardware
from hybrid5d.plan.memory import stage_memory
from hybrid5d.plan.pipeline import Timeline, timeline
from hybrid5d.plan.search import Found, degrees, search
from tests.cli.test_plan import run_yaml
from tests.cli_kit import hybrid5d
from tests.plan.test_planning_cases import LLAMA8, job, model

H100 = load_hardware("h100")
SIZES = {
    "num_layers": 80, "hidden_size": 8192, "ffn_hidden_size": 28672, "num_attention_heads": 64, "num_query_groups": 8,
    "padded_vocab_size": 128256, "precision": "bf16",
}  # fmt: skip


def big(folder: Path, **other: Any) -> Path:
    keys = {f"actor__model__{name}": value for name, value in SIZES.items()}
    return run_yaml(folder, actor__model__model_path="/nowhere", actor__global_batch_size=2048, **keys, **other)


def test_1024_gpus_are_little_work_and_best_is_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Playing the schedules takes most of the time: some 100,000 instructions a second, and each schedule once."""
    played: dict[Any, int] = {}

    def counted(*what: Any) -> Timeline:
        times = timeline(*what)
        assert what[:2] not in played
        played[what[:2]] = sum(map(len, times.start))
        return times

    jobs.played.cache_clear()
    jobs._short.cache_clear()
    monkeypatch.setattr(jobs, "timeline", counted)
    best, run = tmp_path / "best.yaml", big(tmp_path)
    done = hybrid5d("plan", run, "--world-size", 1024, "--search", "--write", best, "--format", "json")
    assert done.returncode == 0, done.stderr
    assert 0 < sum(played.values()) < 700_000
    rows = json.loads(done.stdout)["best"]
    assert [r["seconds"] for r in rows] == sorted(r["seconds"] for r in rows) and len(rows) == 10
    assert all(r["tp"] * r["pp"] * r["cp"] * r["dp"] == 1024 for r in rows)
    assert rows[0]["loses"].startswith("best") and all("slower" in r["loses"] for r in rows[1:])
    again = hybrid5d("plan", best, "--world-size", 1024, "--format", "json")
    found = json.loads(again.stdout)
    assert found["layout"]["tp"] == rows[0]["tp"] and found["batch"]["global_batch_size"] == 2048
    assert found["memory"]["fits"] and abs(found["time"]["total"] / rows[0]["seconds"] - 1) < 1e-9
    assert hybrid5d("plan", run, "--world-size", 1024, "--search", "--write", best).returncode == 2  # never overwritten


def test_all_layouts_are_there_or_have_a_reason() -> None:
    """16 ranks, 4 a node: 4 divisors chains of (tp, pp, cp, dp) counted by hand, none twice."""
    found = Found()
    spec = model(64, 192, 4, 2, 6, 1000)
    listed = list(degrees(replace(job(spec), node=4), 16, found))
    assert len(set(listed)) == len(listed)
    # tp 1, 2, 4 (8 and 16 cut no 4 heads); pp 1, 2, 4 (8 and 16 are more than 6 layers); cp any divisor of the rest
    rest = [16 // tp // pp for tp in (1, 2, 4) for pp in (1, 2, 4)]
    assert len(listed) == sum(n.bit_length() for n in rest)
    assert found.reasons["tp does not cut heads or MLP width"] == 2
    assert found.reasons["more pipeline stages than layers"] == 3  # pp 8 and 16 at tp 1, pp 8 at tp 2


def test_what_does_not_fit_is_said_and_recomputation_comes_only_where_needed() -> None:
    tight = replace(H100, memory_gib=24)
    base = job(LLAMA8, seq=8192)
    roomy, narrow = (search(base, 8, 64, hw) for hw in (H100, tight))
    assert narrow.fitting < roomy.fitting
    assert narrow.reasons["does not fit the memory, with full recomputation neither"] > 0
    for candidate in narrow.best:
        peaks = [stage_memory(candidate.job, r, tight).fits for r in range(candidate.job.layout.pp)]
        assert all(peaks), candidate.to_dict()
    assert {c.job.recompute.granularity for c in roomy.best[:3]} == {None}
    assert any(c.job.recompute.granularity for c in narrow.best)


def test_nothing_fits(tmp_path: Path) -> None:
    done = hybrid5d("plan", big(tmp_path), "--world-size", 2, "--search")
    assert done.returncode == 2 and "no layout of 2 ranks fits h100" in done.stderr
    assert "does not fit the memory" in done.stdout
    assert "--search needs --world-size" in hybrid5d("plan", big(tmp_path), "--search").stderr


def test_the_run_that_is_searched_need_not_be_one_of_the_layouts(tmp_path: Path) -> None:
    """64 rows on 128 ranks divide over no dp of 128, and not into micro-batches of 3; with tp and pp they do."""
    run = run_yaml(
        tmp_path, actor__model__model_path="/nowhere", actor__global_batch_size=64, actor__micro_batch_size=3,
        **{f"actor__model__{name}": value for name, value in SIZES.items()},
    )  # fmt: skip
    done = hybrid5d("plan", run, "--world-size", 128, "--search", "--format", "json")
    assert done.returncode == 0, done.stderr
    assert all(64 % (r["dp"] * r["micro_batch"]) == 0 for r in json.loads(done.stdout)["best"])
    for word in ("pipeline_schedule=interleaved", "pipeline_warmup=wide", "pipeline_schedule=zb-h1"):  # it varies them
        zero = "+actor.deepspeed.zero_optimization={stage: 2}"
        done = hybrid5d("plan", run, f"actor.model.{word}", zero, "--world-size", 128, "--search", "--format", "json")
        assert done.returncode == 0, done.stderr
    wrong = hybrid5d("plan", run, "actor.optim.lr=-1", "--world-size", 128, "--search")
    assert wrong.returncode == 2 and "actor.optim.lr" in wrong.stderr
