"""Lines of the console, metrics.jsonl, the run directory."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hybrid5d.config.schema import RunConfig
from hybrid5d.engine.results import StepResult
from hybrid5d.launch.env import LaunchEnv, environment
from hybrid5d.train.metrics import Console, JsonLines, WandB, duration, open_trackers, step_line, step_record
from hybrid5d.train.run_folder import EVALS, METRICS, RunFolder


def result(step: int = 3, **changes: Any) -> StepResult:
    values: dict[str, Any] = {
        "step": step, "loss": 2.5, "grad_norm": 0.75, "lr": 1e-3, "valid_tokens": 90, "tokens": 100, "step_time_s": 0.5,
        "peak_memory_bytes": 2**30, "rows_seen": (4, 1),
    }  # fmt: skip
    return StepResult(**{**values, **changes})


def test_a_step_is_one_object_with_tokens_counted_once() -> None:
    record = step_record(result())
    assert set(record) == {
        "step", "loss", "grad_norm", "lr", "valid_tokens", "tokens", "step_time_s", "tokens_per_second",
        "peak_memory_bytes", "rows_seen", "padding",
    }  # fmt: skip
    assert step_record(result(), 0.41)["mfu"] == 0.41
    assert record["tokens_per_second"] == 200.0 and record["rows_seen"] == [4, 1]
    assert step_record(result(skipped=True))["skipped"] is True


def test_lines_are_whole_and_json_has_no_nan(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "m.jsonl")
    sink.write({"step": 1, "loss": math.nan, "grad_norm": math.inf})
    text = (tmp_path / "m.jsonl").read_text()
    sink.close()
    assert json.loads(text) == {"step": 1, "loss": None, "grad_norm": None} and text.endswith("\n")


def test_the_console_line() -> None:
    line = step_line(result(), 200, 75.2)
    assert line == "step   3/200   2%  loss 2.5000  grad norm 0.750  lr 1.00e-03  200 tok/s  mem 1.00 GiB  eta 1:15"
    assert step_line(result(), None, None).startswith("step 3  loss")
    assert "  200 tok/s  mfu 41.3%  pad 7%  mem" in step_line(result(padding=0.071), None, None, 0.4131)
    assert "skipped" in step_line(result(skipped=True), 9, None)
    assert [duration(s) for s in (0.4, 59.6, 3599, 7385)] == ["0:00", "1:00", "59:59", "2:03:05"]


def test_the_first_step_does_not_count_for_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 102.0, 104.0])  # ends of the steps; the first took 100 s
    monkeypatch.setattr("hybrid5d.train.metrics.time.perf_counter", lambda: next(times))
    console, lines = Console(True, 10), []
    monkeypatch.setattr(console, "say", lines.append)
    for step in (1, 2, 3):
        console.step(result(step))
    assert "eta" not in lines[0]
    assert lines[1].endswith("eta 0:16") and lines[2].endswith("eta 0:14")


def write(path: Path, steps: list[int], tail: str = "") -> None:
    path.write_text("".join(f'{{"step": {s}}}\n' for s in steps) + tail)


def test_resuming_cuts_what_comes_after(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write(folder / METRICS, [1, 2, 3, 4], '{"step": 5, "lo')
    write(folder / EVALS, [2, 4])
    folder.open_metrics(2)
    assert [json.loads(x)["step"] for x in (folder / METRICS).read_text().splitlines()] == [1, 2]
    assert (folder / EVALS).read_text() == '{"step": 2}\n'


def test_a_result_marks_the_end(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.exit_code() is None
    folder.write_result({"exit_code": 0, "steps": 4})
    assert folder.exit_code() == 0


def test_environment_names_versions_and_launcher() -> None:
    found = environment(LaunchEnv(0, 8, 0, 8, "torchrun"), "cpu")
    assert {"torch", "deepspeed", "numpy"} <= set(found["packages"]) and found["launcher"] == "torchrun"


def config(*backends: str) -> RunConfig:
    return RunConfig.model_validate({"runner": {"logger": {"logger_backends": list(backends), "project_name": "p"}}})


def test_tensorboard_writes_event_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tracker,) = open_trackers(config("tensorboard"), tmp_path)
    tracker.log(1, {"train/loss": 2.0})
    tracker.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 2.0)]


def test_wandb_gets_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Run:
        def log(self, values: Any, step: int) -> None:
            calls.append((step, values))

        def finish(self) -> None:
            calls.append("finish")

    class Module:
        @staticmethod
        def init(**options: Any) -> Run:
            calls.append(options["project"])
            return Run()

    monkeypatch.setitem(__import__("sys").modules, "wandb", Module)
    tracker = WandB(tmp_path, config("wandb"))
    tracker.log(2, {"train/loss": 1.0})
    tracker.close()
    assert calls == ["p", (2, {"train/loss": 1.0}), "finish"]
