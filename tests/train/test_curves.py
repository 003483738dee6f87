"""`hybrid5d report`: the page holds what the run's files say, and needs nothing else."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from hybrid5d.train.curves import BOTTOM, HEIGHT, LEFT, POINTS, TOP, WIDTH, thinned
from tests.cli_kit import hybrid5d
from tests.plan.test_page import Reader


def write_run(folder: Path, losses: list[Any], **more: list[Any]) -> Path:
    folder.mkdir()
    lines = [
        {"step": i, "loss": loss, "lr": 1e-3, "tokens_per_second": 10.0 * i, "peak_memory_bytes": 2**30,
         "rows_seen": [i], **{name: values[i - 1] for name, values in more.items()}}
        for i, loss in enumerate(losses, 1)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9, "lo')
    (folder / "eval.jsonl").write_text('{"step": 0, "loss": 6.0}\n{"step": 3, "loss": 2.5}\n')
    return folder


def points(html: str, metric: str) -> list[list[tuple[float, float]]]:
    """The lines of a panel, in pixels."""
    panel = html.split(f"<h2>{metric}</h2>")[1].split("<h2>")[0]
    return [[tuple(map(float, p.split(","))) for p in line.split()] for line in re.findall(r'points="([^"]*)"', panel)]


def test_the_page_shows_the_runs(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", [5.0, 4.0, 3.0], reward=[0.1, 0.2, 0.4])
    (first / "result.json").write_text('{"exit_code": 0}')
    second = write_run(tmp_path / "b<i>", [4.5, None, 2.0])
    done = hybrid5d("report", first, second, "--out", tmp_path / "both.html")
    assert done.returncode == 0, done.stderr
    html = (tmp_path / "both.html").read_text()
    reader = Reader()
    reader.feed(html)
    assert not reader.open and "<i>" not in html
    assert not re.search(r"https?:|src=|@import|url\(|<script", html)
    headings = re.findall(r"<h2>(.*?)</h2>", html)
    assert headings == ["loss", "lr", "tokens per second", "peak memory bytes", "reward"]
    cells = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", html)
    row = cells[cells.index(str(first)) :][:8]
    assert row == [str(first), "3", "5.0000", "3.0000", "2.5000", "25", "1.00 GiB", "reached"]
    assert "no result" in cells
    # held-out 6 at step 0 is the top left corner, the loss of 2 at step 3 the bottom right one
    high, low = TOP, HEIGHT - BOTTOM
    left, right = LEFT, WIDTH - 10
    loss = points(html, "loss")
    at = {x: left + x / 3 * (right - left) for x in (1, 2, 3)}
    y = {v: high + (6 - v) / 4 * (low - high) for v in (5, 4, 3, 4.5, 2)}
    assert sum(loss[0], ()) == pytest.approx((at[1], y[5], at[2], y[4], at[3], y[3]), abs=0.06)
    # a null is a gap: two pieces of one point each, and said
    assert [len(set(piece)) for piece in loss[1:]] == [1, 1]
    assert loss[1][0] + loss[2][0] == pytest.approx((at[1], y[4.5], at[3], y[2]), abs=0.06)
    assert "not finite in 1 steps, the first 2" in html
    assert html.count("held-out loss 2.5000 after step 3") == 2


def test_what_is_no_number_is_said_and_rewards_are_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [3.0, None])
    evals = ({"step": 0, "loss": 6.0}, {"step": 2, "loss": None}, {"step": 1, "reward": 0.25})
    (run / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evals))
    lost = write_run(tmp_path / "b", [None, None])
    assert hybrid5d("report", run, lost, "--out", tmp_path / "x.html").returncode == 0
    html = (tmp_path / "x.html").read_text()
    cells = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", html)
    assert cells[cells.index(str(run)) :][2:5] == ["3.0000", "not finite", "6.0000"]
    assert f"{run}: held-out loss is no number after step 2" in html
    assert f"{lost}: not finite in 2 steps, the first 1" in html
    assert f"{run}: 0.25 to 0.25" in html.split("<h2>held out reward</h2>")[1]
    (run / "eval.jsonl").unlink()
    (run / "eval.jsonl").mkdir()
    done = hybrid5d("report", run)
    assert done.returncode == 2 and "eval.jsonl cannot be read" in done.stderr


def test_thinning_keeps_spikes_and_gaps() -> None:
    series = [(i, math.sin(i)) for i in range(50_000)]
    series[777], series[31_000], series[40_001] = (777, 99.0), (31_000, -99.0), (40_001, math.nan)
    kept = thinned(series)
    assert len(kept) <= 2 * POINTS and [x for x, _ in kept] == sorted(x for x, _ in kept)
    assert {(777, 99.0), (31_000, -99.0)} <= set(kept) and sum(math.isnan(y) for _, y in kept) == 1
    assert thinned(series[:POINTS]) == series[:POINTS]


def test_refusals(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [1.0])
    (tmp_path / "empty").mkdir()
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "metrics.jsonl").write_text("")
    for words, said in (
        ((tmp_path / "empty",), "metrics.jsonl cannot be read"),
        ((tmp_path / "none",), "no step has left a number yet"),
        ((run, "--out", tmp_path / "x.png"), "ends with .html"),
        ((run, "--out", tmp_path / "no" / "x.html"), "cannot be written"),
    ):
        done = hybrid5d("report", *words)
        assert done.returncode == 2 and said in done.stderr, done.stderr
    assert hybrid5d("report", run).returncode == 0 and (run / "report.html").is_file()
