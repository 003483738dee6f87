"""Tiny awkward models and ragged rows; the independent reference is `hybrid5d.check.reference`."""

from __future__ import annotations

from typing import Any

import numpy as np

from hybrid5d.check.compare import Trace as Trace
from hybrid5d.check.reference import Recipe as Recipe
from hybrid5d.check.reference import document_loss_sum as document_loss_sum
from hybrid5d.check.reference import documents_of as documents_of
from hybrid5d.check.reference import hf_model as hf_model
from hybrid5d.check.reference import reference as reference
from hybrid5d.check.reference import save_model as save_model
from hybrid5d.data.types import IGNORE_INDEX, Document, StepBatch, shift_labels

COMMON = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **COMMON, "tie_word_embeddings": False},
    "llama_bias": {
        "model_type": "llama", **COMMON, "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True,
        "pad_token_id": 5,
    },
    "qwen2": {"model_type": "qwen2", **COMMON, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **COMMON, "tie_word_embeddings": True, "head_dim": 16},
    "mistral": {"model_type": "mistral", **COMMON, "tie_word_embeddings": False, "sliding_window": None},
    "mistral_window": {"model_type": "mistral", **COMMON, "tie_word_embeddings": False, "sliding_window": 7},
    "qwen2_window": {
        "model_type": "qwen2", **COMMON, "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 5,
        "max_window_layers": 2,
    },
    "linear": {
        "model_type": "llama", **COMMON, "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 3.0},
    },
    "llama3": {
        "model_type": "llama", **COMMON, "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_theta": 500.0, "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "yarn": {
        "model_type": "qwen2", **COMMON, "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_theta": 1000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
        },
    },
}  # fmt: skip


def make_rows(count: int, length: int, vocab: int, seed: int = 0, *, ragged: bool = True) -> list[Document]:
    """Rows with ragged labels; every fourth row has no label at all. `ragged` varies the lengths too."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        n = int(rng.integers(max(3, length // 2), length + 1)) if ragged else length
        ids = rng.integers(0, vocab, n).astype(np.int64)
        labels = np.where(rng.random(n) < 0.6, ids, IGNORE_INDEX)
        if i % 4 == 3:
            labels[:] = IGNORE_INDEX
        rows.append(Document(ids, shift_labels(labels), i))
    return rows


def labelled_row(length: int, valid: int, row: int, vocab: int = 101) -> Document:
    """A row of which the first `valid` predictions count."""
    rng = np.random.default_rng(row)
    ids = rng.integers(0, vocab, length).astype(np.int64)
    labels = np.full(length, IGNORE_INDEX, dtype=np.int64)
    labels[:valid] = ids[1 : valid + 1]
    return Document(ids, labels, row)


def make_packed_rows(count: int, length: int, vocab: int, seed: int = 0) -> list[tuple[Document, ...]]:
    """Rows of one to four documents of uneven lengths, one-token documents and unlabelled ones among them."""
    rng = np.random.default_rng(seed)
    rows, row_id = [], 0
    for _ in range(count):
        cuts = np.sort(rng.choice(np.arange(1, length), int(rng.integers(0, 4)), replace=False))
        row = []
        for n in np.diff(np.concatenate([[0], cuts, [length]])):
            (d,) = make_rows(1, int(n), vocab, seed=seed * 1000 + row_id, ragged=False)
            row.append(Document(d.input_ids, d.labels, row_id))
            row_id += 1
        rows.append(tuple(row))
    return rows


def step_batch(rows: list[Any], dp: int, dp_rank: int, micro: int) -> StepBatch:
    """This dp rank's share of a global batch: a contiguous run of rows; a row is a document or a tuple of them."""
    packed = [row if isinstance(row, tuple) else (row,) for row in rows]
    per = len(packed) // dp
    mine = packed[dp_rank * per : (dp_rank + 1) * per]
    batches = tuple(tuple(mine[i : i + micro]) for i in range(0, per, micro))
    return StepBatch(batches, tuple(d.row_id for row in packed for d in row))
