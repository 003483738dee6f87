"""From rows to the micro-batches of one dp rank.

Which rows form global batch g of an epoch is a function of (seed, epoch, g); how they are dealt to dp ranks and
micro-batches is a function of their lengths and the layout. Each rank computes all of it by itself: the tp, cp and pp
peers of a dp rank get equal rows, and `step(k)` needs no step before it, so a resumed run continues exactly.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import numpy as np

from hybrid5d.data.balance import budget_micro_batches, karmarkar_karp
from hybrid5d.data.dataset import Dataset
from hybrid5d.data.options import LoaderOptions
from hybrid5d.data.order import epoch_order
from hybrid5d.data.packing import PackPlan, pack_first_fit_decreasing
from hybrid5d.data.types import IGNORE_INDEX, Document, Row, StepBatch
from hybrid5d.errors import DataError

Samples = tuple[int, ...]  # samples that share a row; one without packing, none in a row that only fills up
DUMMY_ROW_ID = -1


class Loader:
    """Iterable of StepBatch for one dp rank. `step(k)` gives any step directly.

    Attributes:
        num_rows: rows per epoch (packed ones count once).
        steps_per_epoch: the same in every epoch.
        total_steps: None when neither max_steps nor max_epochs bounds the run.
    """

    def __init__(self, dataset: Dataset, options: LoaderOptions):
        unit = options.micro_batch_size * options.dp
        assert options.token_budget is not None or options.global_batch_size % unit == 0, "plan.batch refuses this"
        self.dataset, self.options = dataset, options
        packed = options.config.packing == "documents" and options.token_budget is None
        self.pack_plan: PackPlan | None = None
        if packed:
            self.pack_plan = pack_first_fit_decreasing(dataset.lengths, dataset.seq_length)
        self.num_rows = self.pack_plan.num_rows if self.pack_plan is not None else len(dataset)
        _check_budget(dataset, options)
        whole, left = divmod(self.num_rows, options.global_batch_size)
        self.steps_per_epoch = whole + (1 if left and options.config.last_batch == "pad" else 0)
        if self.num_rows and not self.steps_per_epoch:
            raise DataError(
                f"data.last_batch=drop_last: {self.num_rows} rows are fewer than"
                f" actor.global_batch_size={options.global_batch_size}, so no step is left. Fix: data.last_batch: pad"
            )
        self.total_steps = self._total_steps()
        self._epoch_rows = lru_cache(maxsize=2)(self._compute_epoch_rows)

    def describe(self) -> str:
        """For the start of a run: what was read, how full packed rows are, how long an epoch is; then the notices."""
        parts = [str(self.dataset.report), f"{self.steps_per_epoch} steps an epoch"]
        if self.pack_plan is not None:
            parts.append(f"packed into {self.num_rows} rows, fill rate {self.pack_plan.fill_rate:.3f}")
        return "\n".join(["; ".join(parts), *(f"notice: {text}" for text in self.dataset.report.notices)])

    def identity(self) -> dict[str, int | str | bool]:
        """What decides which rows step k has; JSON-ready, by the names that a user knows."""
        options, report = self.options, self.dataset.report
        lengths = np.ascontiguousarray(self.dataset.lengths, dtype=np.int64)
        return {
            "rows": report.rows,
            "tokens": report.tokens,
            "hash of the rows' lengths": zlib.crc32(lengths.tobytes()),
            "hash of the tokens": zlib.crc32(json.dumps(self.dataset.store.meta["crc32"], sort_keys=True).encode()),
            "actor.global_batch_size": options.global_batch_size,
            "data.seed": options.config.seed,
            "data.shuffle": options.config.shuffle,
            "data.last_batch": options.config.last_batch,
            "data.packing": options.config.packing,
        }

    def _total_steps(self) -> int | None:
        bounds = []
        if self.options.max_steps is not None:
            bounds.append(self.options.max_steps)
        if self.options.max_epochs is not None:
            bounds.append(self.options.max_epochs * self.steps_per_epoch)
        if not self.steps_per_epoch:
            return 0
        return min(bounds) if bounds else None

    def __iter__(self) -> Iterator[StepBatch]:
        step = self.options.start_step
        while self.total_steps is None or step < self.total_steps:
            yield self.step(step)
            step += 1

    def step(self, step: int) -> StepBatch:
        """Step `step` (0-based, counted from the start of training)."""
        epoch, place = divmod(step, self.steps_per_epoch)
        size = self.options.global_batch_size
        rows = self._rows_of_epoch(epoch, place * size, (place + 1) * size)
        micro_batches = deal(rows, self._length, self._batch_size(len(rows)), self.options)
        return StepBatch(
            micro_batches=tuple(tuple(self._row(samples) for samples in mb) for mb in micro_batches),
            row_ids=tuple(sample for samples in rows for sample in samples),
            epoch=epoch,
        )

    def _batch_size(self, num_rows: int) -> int:
        """Rows that a batch of `num_rows` is filled up to."""
        return self.options.global_batch_size

    def _compute_epoch_rows(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """(order of rows, samples, bounds of the rows in `samples` or None without packing)."""
        seed, shuffle = self.options.config.seed, self.options.config.shuffle
        order = epoch_order(len(self.dataset), seed=seed, epoch=epoch, shuffle=shuffle)
        if self.pack_plan is None:
            return order, order, None
        rank = np.empty_like(order)
        rank[order] = np.arange(order.size)
        samples, bounds = self.pack_plan.rows(rank)
        return epoch_order(self.num_rows, seed=seed, epoch=epoch, shuffle=shuffle), samples, bounds

    def _rows_of_epoch(self, epoch: int, start: int, stop: int) -> list[Samples]:
        order, samples, bounds = self._epoch_rows(epoch)
        chosen = order[start:stop].tolist()
        if bounds is None:
            return [(row,) for row in chosen]
        return [tuple(samples[bounds[row] : bounds[row + 1]].tolist()) for row in chosen]

    def _length(self, sample: int) -> int:
        return int(self.dataset.lengths[sample])

    def _row(self, samples: Samples) -> Row:
        return tuple(d for s in samples for d in self.dataset.documents(s)) if samples else (dummy_document(),)


def deal(
    rows: Sequence[Samples], length_of: Callable[[int], int], batch_size: int, options: LoaderOptions
) -> list[list[Samples]]:
    """The micro-batches of a dp rank, of rows filled up to `batch_size`; by tokens where there is a budget."""
    if options.token_budget is not None:
        lengths = [length_of(row[0]) for row in rows]
        parts = budget_micro_batches(lengths, options.dp, options.token_budget)[options.dp_rank]
        return [[tuple(rows[i][0] for i in part)] for part in parts]
    filled: list[Samples] = [*rows, *[()] * (batch_size - len(rows))]
    size, dp, mine = options.micro_batch_size, options.dp, options.dp_rank
    if options.balance_dp and dp > 1:
        tokens = [sum(map(length_of, row)) or 1 for row in filled]
        own = karmarkar_karp(tokens, dp, equal_count=True)[mine]
        return [[filled[i] for i in own[j : j + size]] for j in range(0, len(own), size)]
    chunks = range(mine * size, len(filled), dp * size)  # micro-batches go round the dp ranks
    return [filled[j : j + size] for j in chunks]


class EvalLoader(Loader):
    """Every row once, in natural order; the last batch is filled up only to equal micro-batches on all dp ranks."""

    def _batch_size(self, num_rows: int) -> int:
        unit = self.options.micro_batch_size * self.options.dp
        return -(-num_rows // unit) * unit


def dummy_document() -> Document:
    """One token without a target: what a row that only fills up a batch consists of."""
    return Document(input_ids=np.zeros(1, np.int64), labels=np.full(1, IGNORE_INDEX, np.int64), row_id=DUMMY_ROW_ID)


def _check_budget(dataset: Dataset, options: LoaderOptions) -> None:
    if options.token_budget is None or not len(dataset):
        return
    longest = int(dataset.lengths.max())
    if longest > options.token_budget:
        raise DataError(
            f"runner.max_tokens_per_mbs times context_parallel_size is {options.token_budget}, the longest row has"
            f" {longest} tokens and fits into none. Fix: a budget >= {longest}, or a shorter runner.seq_length"
        )
