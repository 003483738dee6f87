"""Ragged rows for a check: cut from the first records of the run's own data, else from a seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np

from hybrid5d.check.shrink import ROW_LENGTH, STEPS, VOCABULARY, Small
from hybrid5d.config.schema import RunConfig
from hybrid5d.data.build import loader_from_plan
from hybrid5d.data.faults import Faults
from hybrid5d.data.sources import resolve_sources
from hybrid5d.data.types import IGNORE_INDEX, Document, shift_labels
from hybrid5d.errors import HybridError
from hybrid5d.files import write_whole
from hybrid5d.plan.run import RunPlan

RECORDS = 64  # of the run's first file; more would be tokenising, not checking
TEXT_BYTES = 20_000


def write_rows(small: Small, folder: Path) -> str:
    """Write `folder/rows.jsonl`, records of `data.type: tokens`; returns where the rows come from, for people."""
    count = small.rows * STEPS * (3 if small.packed else 1)
    longest = ROW_LENGTH // 2 if small.packed else ROW_LENGTH
    own, said = _own(small.plan, folder)
    rows = [_window(d, longest, i) for i, d in enumerate(own)]
    if not rows or sum(int((d.labels != IGNORE_INDEX).sum()) for d in rows) < len(rows):
        said = f"rows from a seed: {'the run names no data' if not said else 'too few targets' if rows else said}"
        rows = seeded(count, longest)
    rows = [rows[i % len(rows)] for i in range(count)]
    write_whole(folder / "rows.jsonl", "".join(f"{json.dumps(_record(d))}\n" for d in rows))
    return said


def seeded(count: int, longest: int) -> list[Document]:
    """Rows of uneven length with uneven labels; every fourth has none."""
    rng, rows = np.random.default_rng(1), []
    for i in range(count):
        n = int(rng.integers(max(3, longest // 4), longest + 1))
        ids = rng.integers(0, VOCABULARY, n).astype(np.int64)
        labels = np.where(rng.random(n) < (0 if i % 4 == 3 else 0.6), ids, IGNORE_INDEX)
        rows.append(Document(ids, shift_labels(labels), i))
    return rows


def _own(plan: RunPlan, folder: Path) -> tuple[Sequence[Document], str]:
    """Documents of the run's first file, or none and why."""
    paths = plan.config.data.train_data_paths or ()
    faults = Faults()
    sources = resolve_sources(paths, plan.config.data.type, faults)
    first = next((s for s in sources if s.kind in ("jsonl", "text")), None)
    if first is None:
        return [], "none of the run's data files is here as JSON lines or text" if paths else ""
    target = folder / f"head{first.path.suffix}"
    try:
        with first.path.open(encoding="utf-8") as file:
            head = file.read(TEXT_BYTES) if first.kind == "text" else "".join(islice(file, RECORDS))
    except (OSError, UnicodeDecodeError) as exc:
        return [], f"{first.path} cannot be read: {exc}"
    write_whole(target, head)
    tree = plan.config.to_tree()
    tree["data"].update(train_data_paths=[str(target)], cache_dir=str(folder / "cache"), packing="none")
    tree["data"].update(shuffle=False, last_batch="pad", overlong="truncate")
    tree["runner"].update(enable_dynamic_batch_size=False)
    single = replace(plan, config=RunConfig.model_validate(tree), batch=replace(plan.batch, dynamic=False))
    try:
        dataset = loader_from_plan(single, 0).dataset
    except HybridError as exc:
        return [], f"the run's data cannot be used: {str(exc).splitlines()[0]}"
    documents = [d for row in range(min(len(dataset), RECORDS)) for d in dataset.documents(row)]
    return documents, f"rows of {first.path}, cut to {ROW_LENGTH} tokens, ids modulo {VOCABULARY}"


def _window(d: Document, longest: int, row: int) -> Document:
    """A piece of uneven length around the first target; ids folded into the small vocabulary."""
    rng = np.random.default_rng(row)
    length = int(rng.integers(max(3, longest // 4), longest + 1))
    targets = np.flatnonzero(d.labels != IGNORE_INDEX)
    start = max(0, int(targets[0]) - int(rng.integers(0, length // 2 + 1))) if targets.size else 0
    ids, labels = d.input_ids[start : start + length] % VOCABULARY, d.labels[start : start + length].copy()
    labels[labels != IGNORE_INDEX] %= VOCABULARY
    return Document(ids, labels, row)


def _record(d: Document) -> dict[str, list[int]]:
    """Labels stand beside their own token in a file."""
    return {"input_ids": d.input_ids.tolist(), "labels": [IGNORE_INDEX, *d.labels[:-1].tolist()]}
