"""Rows of a micro-batch -> the tensors of one rank: concatenated, padded, cut over cp by the sequence plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from hybrid5d.data.types import IGNORE_INDEX, MicroBatch, Row, outside_vocabulary
from hybrid5d.models.batch import LocalBatch
from hybrid5d.parallel.context import ParallelContext
from hybrid5d.plan.sequence import SequencePlan


@dataclass(frozen=True)
class SequenceOptions:
    """How rows are padded and cut; the same for every micro-batch of a run.

    Attributes:
        packed: documents of a row must not see each other; the micro-batch's rows become one.
    """

    method: Literal["p2p", "a2a", "a2a+p2p", "all_gather"] = "p2p"
    load_balance: Literal["zigzag", "contiguous"] = "zigzag"
    ulysses: int = 1
    packed: bool = False


def is_packed(micro_batch: MicroBatch, options: SequenceOptions) -> bool:
    """Whether the micro-batch's rows become one, its documents kept apart: asked for, or a row holds several."""
    return options.packed or any(len(row) > 1 for row in micro_batch)


def rows_of(micro_batch: MicroBatch, options: SequenceOptions) -> list[Row]:
    """The rows as the sequence plan counts them: flattened to one where packed."""
    if is_packed(micro_batch, options):
        return [tuple(d for row in micro_batch for d in row)]
    return list(micro_batch)


def sequence_plan(micro_batch: MicroBatch, ctx: ParallelContext, options: SequenceOptions) -> SequencePlan:
    """The plan of a micro-batch; cached on its lengths."""
    return SequencePlan.build(
        tuple(tuple(len(d) for d in row) for row in micro_batch),
        cp=ctx.cp.size,
        method=options.method,
        ulysses=options.ulysses,
        load_balance=options.load_balance,
        multiple=ctx.tp.size if ctx.sequence_parallel else 1,
        packed=is_packed(micro_batch, options),
    )


def _concatenated(row: Row) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    positions = [np.arange(len(d)) if d.position_ids is None else d.position_ids for d in row]
    return (
        np.concatenate([d.input_ids for d in row]),
        np.concatenate([d.labels for d in row]),
        np.concatenate(positions),
    )


def _take(values: np.ndarray, index: np.ndarray, fill: int) -> np.ndarray:
    if values.size == 0:
        return np.full(index.shape, fill, dtype=np.int64)
    return np.where(index >= 0, values[np.maximum(index, 0)], fill).astype(np.int64)


def local_batch(
    micro_batch: MicroBatch, ctx: ParallelContext, options: SequenceOptions, hidden_size: int, device: torch.device
) -> LocalBatch:
    """Build this rank's share of a micro-batch. Padding gets id 0, position 0 and no label."""
    plan = sequence_plan(micro_batch, ctx, options)
    index = plan.source_index(ctx.cp.rank)
    ids, labels, positions = np.empty_like(index), np.empty_like(index), np.empty_like(index)
    for r, row in enumerate(rows_of(micro_batch, options)):
        tokens, targets, places = _concatenated(row)
        ids[r] = _take(tokens, index[r], 0)
        labels[r] = _take(targets, index[r], IGNORE_INDEX)
        positions[r] = _take(places, index[r], 0)
    shards = ctx.tp.size if ctx.sequence_parallel else 1

    def tensor(a: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(a)).to(device)

    return LocalBatch(
        tensor(ids), tensor(labels), tensor(positions), plan, (plan.batch, plan.local_length // shards, hidden_size)
    )


def fault_of(micro_batches: Sequence[MicroBatch], vocab_size: int) -> str | None:
    """The first row that the model cannot take; a vocabulary cut over tp would give it zeros without a word."""
    for document in (d for mb in micro_batches for row in mb for d in row):
        ids, labels, name = document.input_ids, document.labels, f"row {document.row_id}"
        if ids.shape != labels.shape:
            return f"{name}: {labels.size} labels for {ids.size} input_ids"
        for key, values in (("input_ids", ids), ("labels", labels)):
            fault = outside_vocabulary(key, values, vocab_size)
            if fault:
                return f"{name}: {fault}"
    return None


def valid_tokens(micro_batch: MicroBatch) -> int:
    """Labels that count, before any cut."""
    return sum(int((d.labels != IGNORE_INDEX).sum()) for row in micro_batch for d in row)


def real_tokens(micro_batch: MicroBatch) -> int:
    """Tokens of real rows (dummy rows that only fill up a batch have row_id < 0), before any cut or padding."""
    return sum(len(d) for row in micro_batch for d in row if d.row_id >= 0)
