"""From files to weights: layouts read the same rows and compute what transformers computes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid5d.data.types import Document, shift_labels
from hybrid5d.errors import DataError
from tests.engine_kit import Layout, build_engine, config_dict
from tests.harness import run_ranks
from tests.kit import MODELS, Recipe, hf_model, make_rows, reference, step_batch

SGD = Recipe(lr=0.1)


@dataclass(frozen=True)
class Data:
    """Options of a run's data."""

    rows: int
    batch: int
    data: dict[str, Any] = field(default_factory=dict, hash=False)
    runner: dict[str, Any] = field(default_factory=dict, hash=False)
    actor: dict[str, Any] = field(default_factory=dict, hash=False)


def write_rows(folder: Path, rows: list[Document]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Two JSONL files of rows, labels aligned with input_ids."""
    pairs, count = [], len(rows)
    for d in rows:
        labels = np.concatenate([[-100], d.labels[:-1]])
        pairs.append((d.input_ids, labels))
    for i, part in enumerate((pairs[: count // 2], pairs[count // 2 :])):
        lines = [json.dumps({"input_ids": x.tolist(), "labels": y.tolist()}) for x, y in part]
        (folder / f"{i}.jsonl").write_text("\n".join(lines) + "\n")
    return pairs


def _train(
    rank: int, layout: Layout, folder: str, case: Data
) -> list[tuple[float, float, int, int, tuple[int, ...], int]]:
    from hybrid5d.config.schema import RunConfig
    from hybrid5d.data.build import loader_from_plan
    from hybrid5d.engine.build import initialize
    from hybrid5d.plan.run import build_plan

    tree = config_dict(layout, SGD, f"{folder}/model", case.batch)
    tree["runner"] = {"task_type": "sft", "seq_length": 24, "max_epochs": 2, **case.runner}
    paths = [f"{folder}/0.jsonl", f"{folder}/1.jsonl"]
    tree["data"] = {"type": "tokens", "train_data_paths": paths, "cache_dir": f"{folder}/cache", **case.data}
    tree["actor"].update(case.actor)
    plan = build_plan(RunConfig.model_validate(tree), layout.world)
    engine = initialize(plan)
    steps = []
    for batch in loader_from_plan(plan, engine.ctx.dp.rank):
        r = engine.train_batch(batch)
        steps.append((r.loss, r.grad_norm, r.tokens, r.valid_tokens, r.rows_seen, len(batch.micro_batches)))
    return steps


CASES = {
    "partial": Data(13, 4, {"last_batch": "pad"}),
    "dropped": Data(13, 4, {"last_batch": "drop_last"}),
    "packed": Data(16, 2, {"packing": "documents"}),
    "dynamic": Data(16, 8, {}, {"enable_dynamic_batch_size": True, "max_tokens_per_mbs": 38}),
    "balanced": Data(16, 8, {}, {}, {"enable_dp_load_balance": True}),
    "dynamic-packed": Data(
        16, 4, {"packing": "documents"}, {"enable_dynamic_batch_size": True, "max_tokens_per_mbs": 38}
    ),
}
LAYOUTS = [Layout(dp=2), Layout(cp=2, tp=2, sp=True), Layout(2, 2, 1, 2, True)]


QUICK = {"partial", "dynamic-packed"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in CASES]
)
def test_every_layout_reads_and_computes_the_same(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    case = CASES[name]
    pairs = write_rows(tmp_path, make_rows(case.rows, 22, 101, seed=17))
    (tmp_path / "model").symlink_to(folders["qwen3"])
    (one,) = run_ranks(1, _train, Layout(), str(tmp_path), case)
    seen = [row for step in one for row in step[4] if row >= 0]
    epochs = {row: seen.count(row) for row in range(case.rows)}
    if name == "dropped":
        assert len(seen) == 24 and max(epochs.values()) <= 2
    else:
        assert set(epochs.values()) == {2}, "every row once an epoch"
    steps = [[Document(pairs[i][0], shift_labels(pairs[i][1]), i) for i in step[4] if i >= 0] for step in one]
    want = reference(hf_model(MODELS["qwen3"]), steps, SGD)
    np.testing.assert_allclose([s[0] for s in one], want.losses, atol=2e-5)
    np.testing.assert_allclose([s[1] for s in one], want.norms, rtol=2e-5)
    assert [s[2] for s in one] == [sum(len(d) for d in rows) for rows in steps]
    assert [s[3] for s in one] == [sum(int((d.labels >= 0).sum()) for d in rows) for rows in steps]
    for layout in LAYOUTS:
        for got in run_ranks(layout.world, _train, layout, str(tmp_path), case):
            assert [s[2:5] for s in got] == [s[2:5] for s in one], str(layout)
            np.testing.assert_allclose([s[0] for s in got], want.losses, atol=2e-5, err_msg=str(layout))
            np.testing.assert_allclose([s[1] for s in got], want.norms, rtol=2e-5, err_msg=str(layout))


def test_dynamic_batches_vary_from_step_to_step(folders: dict[str, Path], tmp_path: Path) -> None:
    write_rows(tmp_path, [make_rows(1, 2 + i, 101, seed=i, ragged=False)[0] for i in range(16)])
    (tmp_path / "model").symlink_to(folders["llama"])
    ranks = run_ranks(2, _train, Layout(pp=2), str(tmp_path), CASES["dynamic"])
    assert len({s[5] for s in ranks[0]}) > 1
    assert [s[5] for s in ranks[0]] == [s[5] for s in ranks[1]]


BAD_ROWS = {
    "input_ids\\[1\\]=101 is outside the vocabulary": ([1, 101, 3], [2, 3, -100]),
    "input_ids\\[0\\]=-1 is outside the vocabulary": ([-1, 2, 3], [2, 3, -100]),
    "labels\\[1\\]=101 is outside the vocabulary": ([1, 2, 3], [2, 101, -100]),
    "labels\\[0\\]=-7 is outside the vocabulary": ([1, 2, 3], [-7, 2, -100]),
    "2 labels for 3 input_ids": ([1, 2, 3], [2, 3]),
    "input_ids must be a numpy array \\[n\\] of integers, not float64\\[3\\]": ([1.0, 2.0, 3.0], [2, 3, -100]),
    "labels must be a numpy array \\[n\\] of integers, not int64\\[3, 1\\]": ([1, 2, 3], [[2], [3], [-100]]),
}


def _refusals(rank: int, layout: Layout, folder: str) -> list[str]:
    engine = build_engine(layout, SGD, folder, 2)
    found = []
    for ids, labels in BAD_ROWS.values():
        bad = Document(np.array(ids), np.array(labels), 5)
        good = Document(np.array([1, 2]), np.array([2, -100]), 4)
        batch = step_batch([good, bad], layout.dp, engine.ctx.dp.rank, 1)
        calls = (engine.train_batch, batch), (engine.eval_batch, batch), (engine.compute_logprobs, [good, bad])
        for call, argument in calls:
            with pytest.raises(DataError) as e:
                call(argument)
            found.append(str(e.value))
    assert engine.global_step == 0
    return found


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(dp=2)], ids=str)
def test_rows_that_do_not_fit_the_model(layout: Layout, folders: dict[str, Path]) -> None:
    """Rows given to the engine itself: a sharded vocabulary would take them in silence."""
    ranks = run_ranks(layout.world, _refusals, layout, str(folders["qwen3"]))
    for place, (text, _) in enumerate(BAD_ROWS.items()):
        for kind, name in enumerate(("row 5", "row 5", "row 1")):  # logprobs counts the documents it is given
            told = [found[3 * place + kind] for found in ranks]
            assert any(re.search(f"{name}: {text}", t) for t in told), told
            assert all("\n" not in t and ("another dp rank" in t or name in t) for t in told)
