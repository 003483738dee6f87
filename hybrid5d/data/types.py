"""What the data pipeline hands to the engine: ragged documents, not padded tensors.

Padding, the context-parallel cut and device placement happen in the engine, which alone knows the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from hybrid5d.errors import DataError

IGNORE_INDEX = -100
# Per-token columns a document may carry, and what stands where there is no token: padding, dummy rows.
COLUMNS = {
    "loss_weight": 1.0,
    "advantages": 0.0,
    "old_logprobs": 0.0,
    "ref_logprobs": 0.0,
    "rollout_logprobs": 0.0,
    "returns": 0.0,
    "old_values": 0.0,
}


@dataclass(frozen=True)
class Document:
    """One sample.

    Attributes:
        input_ids: [n] int64.
        labels: [n] int64, **already shifted**: `labels[i]` is the target predicted after reading `input_ids[i]`;
            IGNORE_INDEX where there is none (always so at i = n-1).
        row_id: index of the sample in its dataset.
        position_ids: [n] int64, or None for 0..n-1.
        columns: by name (one of COLUMNS) [n] float32, **aligned with labels**: `columns[name][i]` belongs to the target
            `labels[i]`. They go wherever labels go.

    Raises:
        DataError: a column of another name, length or type.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    row_id: int
    position_ids: np.ndarray | None = None
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, values in self.columns.items():
            if name not in COLUMNS:
                raise DataError(f"row {self.row_id}: no column is called {name!r}; the names: {', '.join(COLUMNS)}")
            array, size = isinstance(values, np.ndarray), len(self.input_ids)
            if not array or values.dtype != np.float32 or values.shape != (size,):
                kind = f"{values.dtype}{list(values.shape)}" if array else type(values).__name__
                raise DataError(f"row {self.row_id}: column {name} must be float32[{size}], not {kind}")

    def __len__(self) -> int:
        return len(self.input_ids)


Row = tuple[Document, ...]  # one document, or several when packed
MicroBatch = tuple[Row, ...]


@dataclass(frozen=True)
class StepBatch:
    """The rows of one optimizer step that this dp rank works on.

    Attributes:
        micro_batches: the same count on every dp rank.
        row_ids: sample ids of the whole global batch, all dp ranks, in sampling order.
        epoch: epoch of the first row.
    """

    micro_batches: tuple[MicroBatch, ...]
    row_ids: tuple[int, ...]
    epoch: int = 0


def column_names(documents: Iterable[Document]) -> tuple[str, ...]:
    """Columns of the documents, in the order of COLUMNS.

    Raises:
        DataError: a document with a target lacks a column that another has (but for `loss_weight`, which is then 1).
    """
    documents = list(documents)
    names = tuple(name for name in COLUMNS if any(name in d.columns for d in documents))
    for document in documents:
        missing = [n for n in names if n not in document.columns and n != "loss_weight"]
        if missing and (np.asarray(document.labels) != IGNORE_INDEX).any():
            raise DataError(f"row {document.row_id}: no column {missing[0]}, which other rows of the micro-batch have")
    return names


def outside_vocabulary(key: str, values: np.ndarray, vocab_size: int) -> str | None:
    """The first of input_ids or labels (`key`) that the model does not have; labels may be IGNORE_INDEX."""
    wrong = (values < 0) | (values >= vocab_size)
    if key == "labels":
        wrong &= values != IGNORE_INDEX
    if not wrong.any():
        return None
    place = int(np.argmax(wrong))
    allowed = f"0..{vocab_size - 1}" + (f" or {IGNORE_INDEX}" if key == "labels" else "")
    return f"{key}[{place}]={values[place]} is outside the vocabulary ({allowed})"


def shift_labels(labels: np.ndarray) -> np.ndarray:
    """labels aligned with input_ids -> shifted by one: out[i] = labels[i+1], out[-1] = IGNORE_INDEX."""
    out = np.full(labels.shape, IGNORE_INDEX, dtype=np.int64)
    out[:-1] = labels[1:]
    return out
