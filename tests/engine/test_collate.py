"""Rows -> one rank's tensors: columns stand where their labels stand, however rows are packed, padded and cut."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hybrid5d.data.loader import dummy_document
from hybrid5d.data.types import COLUMNS, IGNORE_INDEX, Document
from hybrid5d.engine.collate import SequenceOptions, local_batch
from hybrid5d.errors import DataError


def fake_context(cp: int, rank: int, tp: int = 1) -> Any:
    axis = SimpleNamespace
    return SimpleNamespace(cp=axis(size=cp, rank=rank), tp=axis(size=tp, rank=0), sequence_parallel=tp > 1)


def numbered(lengths: list[int], numbers: Any, **columns: float) -> Document:
    """A document whose ids are numbers that occur once; labels and columns are functions of them."""
    (size,) = lengths
    ids = np.array([next(numbers) for _ in range(size)], np.int64)
    labels = np.where(ids % 3 == 0, IGNORE_INDEX, ids + 1000)
    return Document(ids, labels, int(ids[0]), columns={n: (ids * f).astype(np.float32) for n, f in columns.items()})


@pytest.mark.parametrize("method,ulysses", [("p2p", 1), ("a2a", 3), ("all_gather", 1)])
@pytest.mark.parametrize("balance", ["zigzag", "contiguous"])
@pytest.mark.parametrize("rows", [[[5], [9]], [[4, 1, 8], [3]], [[2], [7], [1]]])
def test_columns_go_where_labels_go(rows: list[list[int]], balance: Any, method: Any, ulysses: int) -> None:
    numbers = count(1)
    batch = tuple(tuple(numbered([n], numbers, advantages=0.5, returns=-2.0) for n in row) for row in rows)
    batch = (*batch, (dummy_document(),))
    options = SequenceOptions(method=method, load_balance=balance, ulysses=ulysses)
    seen: list[int] = []
    for rank in range(3):
        local = local_batch(batch, fake_context(3, rank, tp=2), options, 8, torch.device("cpu"))
        ids = local.input_ids
        real = ids > 0
        seen += ids[real].tolist()
        assert torch.equal(local.labels[real], torch.where(ids % 3 == 0, IGNORE_INDEX, ids + 1000)[real])
        assert (local.labels[~real] == IGNORE_INDEX).all() and set(local.columns) == {"advantages", "returns"}
        for name, factor in (("advantages", 0.5), ("returns", -2.0)):
            column = local.columns[name]
            assert column.dtype == torch.float32 and column.shape == local.labels.shape
            assert torch.equal(column, torch.where(real, ids * factor, COLUMNS[name]))
    assert sorted(seen) == list(range(1, next(numbers)))


def test_weights_of_documents_without_any_are_one() -> None:
    weighted, plain = numbered([4], count(1), loss_weight=0.25), numbered([3], count(50))
    local = local_batch(((weighted,), (plain,)), fake_context(1, 0), SequenceOptions(), 8, torch.device("cpu"))
    assert local.columns["loss_weight"].tolist() == [[0.25, 0.5, 0.75, 1.0], [1.0, 1.0, 1.0, 1.0]]


def test_a_column_that_some_rows_lack_is_refused() -> None:
    rows = ((numbered([4], count(1), advantages=1.0),), (numbered([3], count(50)),))
    with pytest.raises(DataError, match="row 50: no column advantages, which other rows of the micro-batch have"):
        local_batch(rows, fake_context(1, 0), SequenceOptions(), 8, torch.device("cpu"))


@pytest.mark.parametrize(
    "name,values,rule",
    [
        ("advantage", np.zeros(3, np.float32), "no column is called 'advantage'; the names: loss_weight, advantages"),
        ("returns", np.zeros(2, np.float32), r"column returns must be float32\[3\], not float32\[2\]"),
        ("returns", np.zeros(3), r"column returns must be float32\[3\], not float64\[3\]"),
        ("returns", [0.0, 0.0, 0.0], r"column returns must be float32\[3\], not list"),
    ],
)
def test_columns_that_no_document_can_have(name: str, values: Any, rule: str) -> None:
    ids = np.arange(3)
    with pytest.raises(DataError, match=f"row 7: {rule}"):
        Document(ids, ids, 7, columns={name: values})
