"""Files of rollouts: what is refused with its line, how rows become groups, and a run that is resumed."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid5d.config.schema import RunConfig
from hybrid5d.errors import ConfigErrors, DataError
from hybrid5d.plan.run import build_plan
from hybrid5d.rl.rollouts import RolloutFiles
from tests.config_kit import native
from tests.harness import run_ranks
from tests.kit import MODELS, save_model

ROW: dict[str, Any] = {"prompt_ids": [1, 2], "response_ids": [3, 4, 5], "reward": 1.0}


def config(path: Path, **changes: Any) -> RunConfig:
    base = {
        "runner__task_type": "reasoning", "runner__seq_length": 8, "data__type": "rollouts",
        "data__rollout_batch_size": 1, "algorithm": {"group_size": 2}, "data__train_data_paths": [str(path)],
    }  # fmt: skip
    return RunConfig.model_validate(native(**{**base, **changes}))


def read(tmp_path: Path, rows: list[dict[str, Any]], **changes: Any) -> RolloutFiles:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RolloutFiles(config(path, **changes), 101)


def grouped(ids: list[Any], **more: Any) -> list[dict[str, Any]]:
    return [{**ROW, "group": i, **more} for i in ids]


BAD: list[tuple[dict[str, Any], str]] = [
    *(({"reward": x}, "reward=") for x in (None, math.nan, "1.0", True, math.inf)),
    ({"response_mask": [1, 1]}, "response_mask must be 3"),
    ({"response_mask": [1, 2, 0]}, "0 or 1"),
    ({"prompt_ids": []}, "nothing predicts the first token"),
    ({"response_ids": []}, "response_ids is empty"),
    ({"response_ids": [3, 101, 5]}, r"response_ids\[1\]=101 is outside the vocabulary"),
    ({"response_ids": [3] * 7}, "2 prompt_ids and 7 response_ids exceed seq_length=8"),
    ({"rollout_logprobs": [-1.0, None, -1.0]}, r"rollout_logprobs\[1\]=None"),
    ({"rollout_logprobs": [-1.0, math.nan, -1.0]}, r"rollout_logprobs\[1\]=nan"),
    ({"rollout_logprobs": [-1.0]}, "3 numbers"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), BAD)
def test_broken_rows_are_refused_with_their_line(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    """R16: each fault by itself."""
    rows = grouped([0, 0])
    rows[1] |= change
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: .*{words}"):
        read(tmp_path, rows)


def test_under_the_mask_anything_goes(tmp_path: Path) -> None:
    """R16: null stands there."""
    rows = grouped([0, 0], response_mask=[1, 0, 1], rollout_logprobs=[-1.0, None, -2.0])
    row = read(tmp_path, rows).step(0)[0]
    assert row.logprobs is not None and row.logprobs.tolist() == [-1.0, 0.0, -2.0]
    document = row.document(0, advantages=np.array([1.0, np.nan, 2.0]))
    assert document.labels.tolist() == [-100, 3, -100, 5, -100]  # the tool's token is read, not learnt
    assert document.columns["advantages"].tolist() == [0, 1, 0, 2, 0]


@pytest.mark.parametrize("key", ["importance_sampling_fix", "recompute_logprobs"])
def test_log_probs_of_the_rollout_where_they_are_needed(tmp_path: Path, key: str) -> None:
    algorithm = {"group_size": 2, key: key == "importance_sampling_fix", "importance_sampling_clip": 2.0}
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: no rollout_logprobs, which algorithm\.{key}"):
        read(tmp_path, grouped([0, 0]), algorithm=algorithm)


def test_groups_are_runs_of_adjacent_rows(tmp_path: Path) -> None:
    """R16: ids come back in a second epoch; an id may be text."""
    files = read(tmp_path, grouped([0, 0, "a", "a", 0, 0]))
    assert files.steps_per_epoch == 3 and [r.group for k in range(4) for r in files.step(k)] == [0, 0, 1, 1, 2, 2, 0, 0]
    for ids, size in (([0, 1, 0, 1], 2), ([0] * 8, 4)):
        with pytest.raises(DataError, match=r"rows\.jsonl:1: group 0 has"):
            read(tmp_path, grouped(ids), algorithm={"group_size": size})
    files = read(tmp_path, grouped([0, 0, 1, 1, 2, 2]), data__rollout_batch_size=2)
    assert files.steps_per_epoch == 1 and "last 1 of 3 groups" in files.describe()
    with pytest.raises(DataError, match="2 groups are fewer than data"):
        read(tmp_path, grouped([0, 0, 1, 1]), data__rollout_batch_size=3)


def test_group_size_counts_trajectories(tmp_path: Path) -> None:
    rows = grouped([0, 0, 0, 0])
    for row, (trajectory, reward) in zip(rows, [("x", 1.0), ("x", 1.0), ("x", 1.0), ("y", 0.0)]):
        row |= {"trajectory": trajectory, "reward": reward}
    dynamic = {"adv_type": "grpo_dynamic", "group_size": 2}
    assert [r.trajectory for r in read(tmp_path, rows, algorithm=dynamic).step(0)] == [0, 0, 0, 1]
    rows[1]["reward"] = 0.5
    with pytest.raises(DataError, match="rows of trajectory 'x' have different rewards"):
        read(tmp_path, rows, algorithm=dynamic)


def _run(rank: int, tree: dict[str, Any], steps: int) -> Any:
    from hybrid5d.engine.build import initialize
    from hybrid5d.plan.run import build_plan
    from hybrid5d.train.resuming import resume
    from hybrid5d.train.rl_trainer import RLTrainer
    from hybrid5d.train.run_folder import RunFolder

    tree["runner"]["max_steps"] = steps
    plan = build_plan(RunConfig.model_validate(tree), 2, "train")
    engine, folder = initialize(plan), RunFolder.of(plan)
    rollouts = RolloutFiles(plan.config, 101)
    if rank == 0:
        folder.path.mkdir(parents=True, exist_ok=True)
    engine.keep_reference()
    RLTrainer(engine, rollouts, folder, resumed=resume(engine, folder, rollouts)).run()


def lines(folder: Path) -> list[dict[str, Any]]:
    keep = ("step", "rl_step", "loss", "grad_norm", "lr", "kl", "ratio", "rows_seen", "reward_mean")
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{name: record[name] for name in keep} for record in records]


def test_a_resumed_run_goes_on_as_the_unbroken_one(tmp_path: Path, folders: dict[str, Path]) -> None:
    """R23: the reference is the start model, not the checkpoint's; order, schedule and counts go on."""
    rng = np.random.default_rng(0)
    rows = [
        {"prompt_ids": rng.integers(0, 101, 3).tolist(), "response_ids": rng.integers(0, 101, int(n)).tolist(),
         "reward": float(rng.normal()), "group": i // 2}
        for i, n in enumerate(rng.integers(1, 9, 8))
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    start = shutil.copytree(folders["llama"], tmp_path / "start")
    tree: dict[str, Any] = {
        "runner": {"task_type": "reasoning", "seq_length": 16, "save_interval": 2, "output_dir": str(tmp_path),
                   "resume_dir": "auto"},
        "data": {"type": "rollouts", "rollout_batch_size": 2, "train_data_paths": [str(tmp_path / "rows.jsonl")]},
        "algorithm": {"group_size": 2, "n_minibatches": 2, "kl_beta": 0.05, "shuffle_rollout": True},
        "actor": {"model": {"model_path": str(start), "tensor_model_parallel_size": 2},
                  "optim": {"lr": 0.01},
                  "lr_sched": {"lr_decay_style": "linear", "lr_decay_iters": 20}},
    }  # fmt: skip
    for name, parts in (("whole", [4]), ("broken", [2, 4])):
        tree["runner"]["experiment_name"] = name
        for steps in parts:
            run_ranks(2, _run, tree, steps)
    whole, broken = lines(tmp_path / "whole"), lines(tmp_path / "broken")
    assert [x["step"] for x in whole] == [1, 2, 3, 4, 5, 6, 7, 8] and whole[4]["rl_step"] == 3
    assert whole[4]["kl"] > 1e-3 and sorted(whole[0]["rows_seen"] + whole[1]["rows_seen"]) == [0, 1, 2, 3]
    assert {tuple(x["rows_seen"]) for x in whole[::4]} != {(0, 1)}
    for a, b in zip(whole, broken, strict=True):
        for name, value in a.items():
            assert b[name] == (value if name == "rows_seen" else pytest.approx(value, rel=1e-5, abs=1e-7)), name
    assert sorted(p.name for p in (tmp_path / "broken" / "checkpoints").glob("global*")) == [
        "global_step_2", "global_step_4",
    ]  # fmt: skip
    save_model(MODELS["llama"], start, seed=1)
    with pytest.raises(Exception, match=r"actor\.model\.model_path.*this folder holds other weights now"):
        run_ranks(2, _run, tree, 5)
    shutil.rmtree(start)
    with pytest.raises(ConfigErrors, match="the KL's reference is the model of this folder, also after a resume"):
        build_plan(RunConfig.model_validate(tree), 2, "train")
