"""What the data pipeline hands to the engine: ragged documents, not padded tensors.

Padding, the context-parallel cut and device placement happen in the engine, which alone knows the layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

IGNORE_INDEX = -100


@dataclass(frozen=True)
class Document:
    """One sample.

    Attributes:
        input_ids: [n] int64.
        labels: [n] int64, **already shifted**: `labels[i]` is the target predicted after reading `input_ids[i]`;
            IGNORE_INDEX where there is none (always so at i = n-1).
        row_id: index of the sample in its dataset.
        position_ids: [n] int64, or None for 0..n-1.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    row_id: int
    position_ids: np.ndarray | None = None

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])


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
