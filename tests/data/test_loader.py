"""Rows of every rank: each row once, equal micro-batch counts, the same global batches in every layout, resume."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from hybrid5d.data.build import build_eval_loader, build_loader
from hybrid5d.data.loader import DUMMY_ROW_ID, Loader
from hybrid5d.data.options import DataOptions
from hybrid5d.data.types import IGNORE_INDEX, Document, StepBatch
from hybrid5d.errors import DataError
from tests.data.kit import data_options, loader_options


def write_rows(path: Path, lengths: list[int], first: int = 0) -> Path:
    """Rows whose tokens all equal the row's number + 10, so that a row is known by its tokens."""
    with open(path, "w") as f:
        for i, n in enumerate(lengths):
            f.write(json.dumps({"input_ids": [10 + first + i] * n}) + "\n")
    return path


def token_options(tmp_path: Path, *files: Path, seq_length: int | None = 64, **kwargs: object) -> DataOptions:
    return data_options(
        kind="tokens",
        paths=tuple(map(str, files)),
        seq_length=seq_length,
        vocab_size=1000,
        cache_dir=str(tmp_path / "cache"),
        **kwargs,  # type: ignore[arg-type]
    )


def documents(batch: StepBatch) -> list[Document]:
    return [d for mb in batch.micro_batches for row in mb for d in row]


def real_ids(batch: StepBatch) -> list[int]:
    return [d.row_id for d in documents(batch) if d.row_id != DUMMY_ROW_ID]


def all_ranks(options: DataOptions, dp: int, **kwargs: object) -> list[list[StepBatch]]:
    return [list(build_loader(options, loader_options(dp=dp, dp_rank=r, **kwargs))) for r in range(dp)]  # type: ignore[arg-type]


@pytest.fixture
def thirteen(tmp_path: Path) -> DataOptions:
    """13 rows of ragged length in two files."""
    a = write_rows(tmp_path / "a.jsonl", [3, 9, 4, 16, 5, 7, 2])
    b = write_rows(tmp_path / "b.jsonl", [6, 11, 3, 8, 1, 12], first=7)
    return token_options(tmp_path, a, b)


@pytest.mark.parametrize("extra", [{}, {"balance_dp": True}, {"token_budget": 20}])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_13_rows_2_files_2_epochs(thirteen: DataOptions, dp: int, extra: dict[str, object]) -> None:
    ranks = all_ranks(thirteen, dp, global_batch_size=4, micro_batch_size=1, max_epochs=2, seed=3, **extra)
    assert [len(r) for r in ranks] == [8] * dp
    for epoch in range(2):
        steps = range(4 * epoch, 4 * epoch + 4)
        seen = Counter(i for r in ranks for k in steps for i in real_ids(r[k]))
        assert seen == Counter(range(13))
        assert sorted(i for k in steps for i in ranks[0][k].row_ids) == list(range(13))
    for k in range(8):
        assert len({len(r[k].micro_batches) for r in ranks}) == 1
        assert len({r[k].row_ids for r in ranks}) == 1 and ranks[0][k].epoch == k // 4
        assert sorted(i for r in ranks for i in real_ids(r[k])) == sorted(ranks[0][k].row_ids)
        for r in ranks:
            assert all(mb and all(row for row in mb) for mb in r[k].micro_batches)  # nothing empty reaches the engine
    first, second = ([i for k in ks for i in ranks[0][k].row_ids] for ks in (range(4), range(4, 8)))
    assert first != second


def test_rows_carry_their_own_tokens_and_shifted_labels(thirteen: DataOptions) -> None:
    (steps,) = all_ranks(thirteen, 1, global_batch_size=4, micro_batch_size=2, max_epochs=1)
    lengths = [3, 9, 4, 16, 5, 7, 2, 6, 11, 3, 8, 1, 12]
    for batch in steps:
        for d in documents(batch):
            if d.row_id == DUMMY_ROW_ID:
                assert len(d) == 1 and d.labels.tolist() == [IGNORE_INDEX]
                continue
            assert d.input_ids.dtype == np.int64 and d.labels.dtype == np.int64
            assert d.input_ids.tolist() == [10 + d.row_id] * lengths[d.row_id]
            assert d.labels.tolist() == [10 + d.row_id] * (lengths[d.row_id] - 1) + [IGNORE_INDEX]


def test_micro_batches_go_round_the_dp_ranks(thirteen: DataOptions) -> None:
    """(dp 2, 2 micro-batches) holds the micro-batches of (dp 1, 4 micro-batches) in the same order."""
    (one,) = all_ranks(thirteen, 1, global_batch_size=8, micro_batch_size=2, max_epochs=2)
    two = all_ranks(thirteen, 2, global_batch_size=8, micro_batch_size=2, max_epochs=2)
    for k, whole in enumerate(one):
        ids = [[d.row_id for row in mb for d in row] for mb in whole.micro_batches]
        for rank in range(2):
            mine = [[d.row_id for row in mb for d in row] for mb in two[rank][k].micro_batches]
            assert mine == ids[rank::2]
        assert [i for mb in ids for i in mb if i >= 0] == list(whole.row_ids)


@pytest.mark.parametrize("extra", [{}, {"packing": "documents"}, {"token_budget": 20}])
def test_resume_gives_the_rows_of_the_unbroken_run(thirteen: DataOptions, extra: dict[str, object]) -> None:
    def key(batch: StepBatch) -> object:
        return [[[(d.row_id, d.input_ids.tolist()) for d in row] for row in mb] for mb in batch.micro_batches]

    options = dict(global_batch_size=2, micro_batch_size=1, max_steps=17, **extra)
    (unbroken,) = all_ranks(thirteen, 1, **options)
    assert len(unbroken) == 17
    for k in (1, 6, 7, 16, 17):
        (resumed,) = all_ranks(thirteen, 1, start_step=k, **options)
        assert [key(b) for b in resumed] == [key(b) for b in unbroken[k:]]


def test_drop_last(thirteen: DataOptions) -> None:
    ranks = all_ranks(thirteen, 2, global_batch_size=4, micro_batch_size=2, max_epochs=2, last_batch="drop_last")
    assert [len(r) for r in ranks] == [6, 6]
    assert all(d.row_id >= 0 for r in ranks for b in r for d in documents(b))
    for epoch in range(2):
        seen = [i for b in ranks[0][3 * epoch : 3 * epoch + 3] for i in b.row_ids]
        assert len(seen) == len(set(seen)) == 12
    with pytest.raises(DataError, match="13 rows are fewer than actor"):
        all_ranks(thirteen, 1, global_batch_size=16, micro_batch_size=1, last_batch="drop_last")


def test_step_bounds(thirteen: DataOptions) -> None:
    def total(**kwargs: int) -> int | None:
        return build_loader(thirteen, loader_options(4, 1, **kwargs)).total_steps

    assert total() is None and total(max_steps=3, max_epochs=1) == 3
    assert total(max_steps=9, max_epochs=2) == 8 and total(max_steps=0) == 0


def test_packed_rows(thirteen: DataOptions, tmp_path: Path) -> None:
    options = token_options(tmp_path, *(Path(p) for p in thirteen.paths), seq_length=16)
    ranks = all_ranks(options, 2, global_batch_size=2, micro_batch_size=1, max_epochs=1, packing="documents")
    seen = Counter(i for r in ranks for b in r for i in real_ids(b))
    assert seen == Counter(range(13))
    rows = [row for r in ranks for b in r for mb in b.micro_batches for row in mb]
    assert all(sum(len(d) for d in row) <= 16 for row in rows)
    assert all(d.labels[-1] == IGNORE_INDEX for row in rows for d in row)  # nothing is predicted across a boundary
    loader = build_loader(options, loader_options(2, 1, packing="documents"))
    assert loader.pack_plan is not None and loader.num_rows == loader.pack_plan.num_rows == 6
    assert loader.pack_plan.fill_rate == pytest.approx(87 / 96)
    assert loader.describe().endswith("3 steps an epoch; packed into 6 rows, fill rate 0.906")
    assert [b.row_ids for b in ranks[0]] == [b.row_ids for b in ranks[1]]


def test_token_budget(thirteen: DataOptions) -> None:
    ranks = all_ranks(thirteen, 2, global_batch_size=6, micro_batch_size=1, max_epochs=3, token_budget=20)
    counts = set()
    for steps in zip(*ranks):
        counts.add(len(steps[0].micro_batches))
        for batch in steps:
            assert all(len(mb) == 1 and sum(len(d) for d in mb[0]) <= 20 for mb in batch.micro_batches)
    assert len(counts) > 1  # the number of micro-batches varies from step to step
    with pytest.raises(DataError, match="the longest row has 16 tokens"):
        all_ranks(thirteen, 2, global_batch_size=6, micro_batch_size=1, token_budget=15)


def test_balanced_dp_shares(tmp_path: Path) -> None:
    lengths = np.clip(np.random.default_rng(5).lognormal(3, 1, 256), 2, 400).astype(int).tolist()
    options = token_options(tmp_path, write_rows(tmp_path / "x.jsonl", lengths), seq_length=400)
    for extra in ({"balance_dp": True}, {"token_budget": 800}):
        ranks = all_ranks(options, 4, global_batch_size=64, micro_batch_size=2, max_epochs=1, **extra)
        for steps in zip(*ranks):
            tokens = [sum(len(d) for d in documents(b)) for b in steps]
            assert max(tokens) <= 1.05 * sum(tokens) / 4
            assert len({len(b.micro_batches) for b in steps}) == 1


@pytest.mark.parametrize("rows", [0, 3, 5, 13])
@pytest.mark.parametrize("dp,mbs,extra", [(1, 1, {}), (2, 2, {}), (4, 1, {}), (2, 1, {"token_budget": 20})])
def test_evaluation_rows(tmp_path: Path, rows: int, dp: int, mbs: int, extra: dict[str, int]) -> None:
    path = write_rows(tmp_path / "val.jsonl", [3 + i for i in range(rows)])
    options = token_options(tmp_path, path)

    def build(rank: int) -> Loader:
        return build_eval_loader(
            options,
            loader_options(
                global_batch_size=4, micro_batch_size=mbs, dp=dp, dp_rank=rank, max_steps=1, start_step=7, **extra
            ),
        )  # type: ignore[arg-type]

    loaders = [build(r) for r in range(dp)]
    for _ in range(2):  # an evaluation can be repeated
        ranks = [list(loader) for loader in loaders]
        assert [len(r) for r in ranks] == [-(-rows // 4)] * dp
        assert Counter(i for r in ranks for b in r for i in real_ids(b)) == Counter(range(rows))
        assert [i for b in ranks[0] for i in b.row_ids] == list(range(rows))
        for steps in zip(*ranks):
            assert len({len(b.micro_batches) for b in steps}) == 1
    if rows == 5 and (dp, mbs) == (1, 1) and not extra:
        assert [len(b.micro_batches) for b in ranks[0]] == [4, 1]  # filled up no further than needed


def test_no_evaluation_files(tmp_path: Path) -> None:
    assert list(build_eval_loader(token_options(tmp_path), loader_options(4, 1))) == []


@pytest.mark.parametrize("overlong,expected", [("truncate", [4, 8, 8, 3]), ("drop", [4, 8, 3])])
def test_overlong(tmp_path: Path, overlong: str, expected: list[int]) -> None:
    path = write_rows(tmp_path / "x.jsonl", [4, 8, 9, 3])
    loader = build_loader(
        token_options(tmp_path, path, seq_length=8, overlong=overlong),
        loader_options(4, 1),
    )
    assert loader.dataset.lengths.tolist() == expected
    last = loader.dataset.document(2)
    assert last.labels[-1] == IGNORE_INDEX and len(last.labels) == len(last)
    report = loader.dataset.report
    assert (report.truncated, report.dropped) == ((1, 0) if overlong == "truncate" else (0, 1))
    assert f"1 samples longer than seq_length {'truncated' if overlong == 'truncate' else 'dropped'}" in str(report)


def test_overlong_error_names_the_line(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x.jsonl", [4, 9])
    with pytest.raises(DataError, match=r"x\.jsonl:2: 9 tokens, more than seq_length=8"):
        build_loader(
            token_options(tmp_path, path, seq_length=8, overlong="error"),
            loader_options(4, 1),
        )


def test_seq_length_may_come_from_the_data(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x.jsonl", [4, 9])
    assert build_loader(token_options(tmp_path, path, seq_length=None), loader_options(1, 1)).dataset.seq_length == 9


def test_rows_without_a_target_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    rows = [
        {"input_ids": [1, 2, 3], "labels": [1, -100, -100]},  # a first token is never predicted
        {"input_ids": [1, 2, 3], "labels": [-100, -100, 3]},
        {"input_ids": [1, 2, 3, 4, 5], "labels": [-100] * 4 + [5]},  # cut off by seq_length 4
        {"input_ids": [1, 2]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    loader = build_loader(token_options(tmp_path, path, seq_length=4), loader_options(1, 1))
    assert loader.dataset.report.without_target == 2
    assert loader.dataset.document(1).labels.tolist() == [-100, 3, -100]
