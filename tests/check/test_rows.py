"""Rows of a check: pieces of the run's own records, with targets in them, or seeded ones and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid5d.check.rows import write_rows
from hybrid5d.check.shrink import ROW_LENGTH, VOCABULARY, cut_of, shrink
from hybrid5d.check.verify import rows
from hybrid5d.data.types import IGNORE_INDEX
from hybrid5d.plan.run import build_plan
from tests.config_kit import config_of, write_model


def written(folder: Path, **keys: Any) -> tuple[str, list[Any]]:
    """What `write_rows` says, and all documents that one rank reads of it."""
    path = str(write_model(folder / "own"))
    plan = build_plan(config_of(actor__model__model_path=path, **keys), 1, "translate")
    small = shrink(plan, cut_of(plan))
    said = write_rows(small, folder)
    write_model(folder / "model", **small.model)
    tree = small.tree(small.cut, str(folder))
    tree["actor"]["model"]["load_weights"] = False
    return said, [d for step in rows(tree) for row in step for d in row]


@pytest.mark.parametrize("packing", ["none", "documents"])
def test_pieces_of_own_records_keep_their_targets(tmp_path: Path, packing: str) -> None:
    # the only targets lie far behind the first tokens
    records = [
        {"input_ids": [(i * 7 + j) % 259 for j in range(200)], "loss_mask": [0] * 150 + [1] * 50} for i in range(9)
    ]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(f"{json.dumps(r)}\n" for r in records))
    said, documents = written(tmp_path, data__train_data_paths=[str(file)], data__packing=packing)
    assert said == f"rows of {file}, cut to {ROW_LENGTH} tokens, ids modulo {VOCABULARY}"
    sources = [np.array(r["input_ids"]) % VOCABULARY for r in records]
    lengths = {len(d) for d in documents}
    assert max(lengths) <= ROW_LENGTH and len(lengths) > 3
    for d in documents:
        windows = [s for s in sources if any((s[i : i + len(d)] == d.input_ids).all() for i in range(200 - len(d) + 1))]
        assert windows, d.input_ids
        has = d.labels != IGNORE_INDEX
        assert (d.labels[:-1][has[:-1]] == d.input_ids[1:][has[:-1]]).all() and not has[-1]
    assert sum(int((d.labels != IGNORE_INDEX).sum()) for d in documents) >= len(documents)


def test_without_usable_data_rows_are_seeded_and_it_says_why(tmp_path: Path) -> None:
    said, documents = written(tmp_path, data__train_data_paths=["/nowhere/x.jsonl"])
    assert said == "rows from a seed: none of the run's data files is here as JSON lines or text"
    assert any((d.labels == IGNORE_INDEX).all() for d in documents)
    (tmp_path / "b").mkdir()
    file = tmp_path / "b" / "mine.jsonl"
    file.write_text('{"input_ids": [5, 900]}\n')
    said, _ = written(tmp_path / "b", data__train_data_paths=[str(file)])
    assert said.startswith("rows from a seed: the run's data cannot be used: ") and "900" in said
