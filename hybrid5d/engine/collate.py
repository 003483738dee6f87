"""Rows of a micro-batch -> the tensors of one rank: concatenated, padded, cut over cp by the sequence plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from hybrid5d.context_parallel.kernels import Kernel
from hybrid5d.context_parallel.ring import Program
from hybrid5d.data.types import COLUMNS, IGNORE_INDEX, Document, MicroBatch, Row, column_names
from hybrid5d.engine.objective import SUPERVISED, Objective
from hybrid5d.models.batch import LocalBatch
from hybrid5d.parallel.context import ParallelContext
from hybrid5d.parallel.copies import to_device
from hybrid5d.plan.sequence import SequencePlan


@dataclass(frozen=True)
class SequenceOptions:
    """How rows are padded and cut; the same for every micro-batch of a run.

    Attributes:
        packed: documents of a row must not see each other; the micro-batch's rows become one.
        kernel: which attends; what it needs on the device goes there with the batch.
        windows: of this rank's layers.
    """

    method: Literal["p2p", "a2a", "a2a+p2p", "all_gather"] = "p2p"
    load_balance: Literal["zigzag", "contiguous"] = "zigzag"
    ulysses: int = 1
    packed: bool = False
    kernel: Kernel | None = None
    windows: frozenset[int | None] = frozenset({None})


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


def local_batch(
    micro_batch: MicroBatch, ctx: ParallelContext, options: SequenceOptions, hidden_size: int, device: torch.device,
    objective: Objective = SUPERVISED,
) -> LocalBatch:  # fmt: skip
    """Build this rank's share of a micro-batch. Padding gets id 0, position 0, no label, and each column's own value.

    One copy to the device, which nothing waits for.

    Raises:
        DataError: documents of the micro-batch with different columns.
    """
    plan = sequence_plan(micro_batch, ctx, options)
    index = plan.source_index(ctx.cp.rank)
    rows = rows_of(micro_batch, options)

    def cut(of: Callable[[Document], np.ndarray], fill: float, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """One value a token, [b, S/cp]: rows concatenated, the rank's places taken."""
        out = torch.full(index.shape, fill, dtype=dtype)
        for r, row in enumerate(rows):
            real = index[r] >= 0
            out[r, torch.from_numpy(real)] = torch.from_numpy(np.concatenate([of(d) for d in row])[index[r][real]])
        return out

    def column(name: str) -> torch.Tensor:
        fill = COLUMNS[name]
        return cut(lambda d: d.columns.get(name, np.full(len(d), fill, np.float32)), fill, torch.float32)

    names = sorted({*column_names(d for row in rows for d in row), *objective.rule.needs})
    programs = _programs(plan, ctx, options, device)
    there = to_device(
        [
            cut(lambda d: d.input_ids, 0),
            cut(lambda d: d.labels, IGNORE_INDEX),
            cut(lambda d: np.arange(len(d)) if d.position_ids is None else d.position_ids, 0),
            *map(column, names),
            *(x for program in programs for x in program.tensors),
        ],
        device,
    )
    ids, labels, positions, *columns = there[: 3 + len(names)]
    rest = iter(there[3 + len(names) :])
    for program in programs:
        program.place(rest, device)
    shards = ctx.tp.size if ctx.sequence_parallel else 1
    return LocalBatch(
        input_ids=ids,
        labels=labels,
        position_ids=positions,
        columns=dict(zip(names, columns)),
        rule=objective.rule,
        temperature=objective.temperature,
        sequence=plan,
        hidden_shape=(plan.batch, plan.local_length // shards, hidden_size),
    )


def _programs(
    plan: SequencePlan, ctx: ParallelContext, options: SequenceOptions, device: torch.device
) -> list[Program]:
    """Attention's programs of this micro-batch that are not on the device yet."""
    if options.kernel is None or device.type == "cpu":
        return []
    made = [Program(plan, ctx.cp.rank // plan.ulysses, options.kernel, w) for w in sorted(options.windows, key=str)]
    return [p for p in made if p.key(device) not in plan.cache]


def valid_tokens(micro_batch: MicroBatch) -> int:
    """Labels that count, before any cut."""
    return sum(int((d.labels != IGNORE_INDEX).sum()) for row in micro_batch for d in row)


def real_rows(micro_batch: MicroBatch) -> int:
    """Samples, those without a label too; dummy rows are none."""
    return sum(d.row_id >= 0 for row in micro_batch for d in row)


def real_tokens(micro_batch: MicroBatch) -> int:
    """Tokens of real rows (dummy rows that only fill up a batch have row_id < 0), before any cut or padding."""
    return sum(len(d) for row in micro_batch for d in row if d.row_id >= 0)
