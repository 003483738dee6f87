"""`hybrid5d train --dry-run`: what a start would say and refuse, without starting anything."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

from hybrid5d.launch import start
from tests.cli_kit import hybrid5d
from tests.launch_kit import TP2, write_run


def test_it_reads_the_data_and_starts_and_writes_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    before = {p.name for p in tmp_path.iterdir()}
    held_out = [f"data.val_data_paths=[{tmp_path}/rows.jsonl]", "runner.val_check_interval=2"]
    with mock.patch.object(start, "_run", side_effect=AssertionError("a launcher was started")):
        done = hybrid5d("train", run, TP2, *held_out, "--num-procs", "4", "--dry-run")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"run directory: {tmp_path}/run"
    assert "run on 4 processes: tp 2 x cp 1 x dp 2 x pp 1" in lines[1]
    assert lines[3].startswith("model: 19,840 parameters, 114 kFLOP a token")
    assert lines[4].startswith("data: 24 rows") and "3 steps an epoch" in lines[4]
    assert any(line.startswith("evaluation data: 24 rows") for line in lines)
    assert lines[-1] == "dry run: deepspeed would start 4 processes"
    assert {p.name for p in tmp_path.iterdir()} - before == {"cache"}


def test_it_refuses_what_a_start_refuses(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for words, said in (
        (["actor.global_batch_size=7", "--num-procs", "2"], "global batch 7 is not a multiple"),
        (["--launcher", "python", "--num-procs", "2"], "plain python starts one process"),
        ([f"runner.output_dir={tmp_path}/file"], "cannot be written"),
        ([f"data.train_data_paths=[{tmp_path}/none.jsonl]"], "none.jsonl"),
        (["actor.model.vocab=3"], "actor.model.vocab"),
        ([f"runner.resume_dir={tmp_path}/empty"], "empty holds no complete checkpoint"),
    ):
        done = hybrid5d("train", run, *words, "--dry-run")
        assert done.returncode == 2, (words, done.stdout)
        assert said in done.stderr and done.stdout == ""
    held_out, empty = f"data.val_data_paths=[{tmp_path}/rows.jsonl]", f"runner.resume_dir={tmp_path}/empty"
    with mock.patch.object(start, "_run", side_effect=AssertionError("a launcher was started")):
        for words in (["--dry-run"], []):
            done = hybrid5d("eval", run, held_out, empty, *words)
            assert done.returncode == 2 and "holds no complete checkpoint" in done.stderr
    assert not (tmp_path / "run" / "eval" / "resolved.yaml").exists()


def test_a_dry_run_has_nothing_to_restart(tmp_path: Path) -> None:
    done = hybrid5d("train", tmp_path / "run.yaml", "--dry-run", "--restarts", "2")
    assert done.returncode == 2 and "--dry-run --restarts: a dry run starts nothing" in done.stderr


def test_rl_settings_that_cannot_be_are_a_line_each_before_anything_starts(tmp_path: Path) -> None:
    rows = [{"prompt_ids": [1], "response_ids": [2, 3], "reward": float(i), "group": 0} for i in range(2)]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = write_run(tmp_path)
    rl = ["runner.task_type=reasoning", "data.type=rollouts", "data.rollout_batch_size=1", "--num-procs", "1",
          f"data.train_data_paths=[{tmp_path}/rollouts.jsonl]", "runner.val_check_interval=-1"]  # fmt: skip
    a = "algorithm."
    cases = [
        ([f"{a}adv_type=ppo", f"{a}loss_type=dpo", f"{a}clip_ratio_c=1.0"], ["adv_type", "loss_type", "clip_ratio_c"]),
        ([f"{a}adv_type=grpo", f"{a}group_size=1"], ["group_size"]),
        ([f"{a}group_size=2", f"{a}importance_sampling_fix=true"], ["importance_sampling_clip"]),
        ([f"{a}group_size=2", f"{a}importance_sampling_fix=true", f"{a}importance_sampling_clip=2"],
         ["no rollout_logprobs, which algorithm.importance_sampling_fix"] * 2),
        ([f"{a}group_size=2", f"{a}recompute_logprobs=false"],
         ["no rollout_logprobs, which algorithm.recompute_logprobs"] * 2),
    ]  # fmt: skip
    with mock.patch.object(start, "_run", side_effect=AssertionError("a launcher was started")):
        for words, wanted in cases:
            done = hybrid5d("train", run, *rl, *words, "--dry-run")
            assert done.returncode == 2, (words, done.stdout, done.stderr)
            lines = [line for line in done.stderr.splitlines() if "algorithm." in line]
            assert len(lines) == len(wanted), done.stderr
            assert all(any(word in line for line in lines) for word in wanted), done.stderr
            if "rollout_logprobs" in wanted[0]:
                assert [f"rollouts.jsonl:{n}" in line for n, line in enumerate(lines, 1)] == [True, True]
