"""The parts of a step beside the model: rows that fit it, tokens counted, factors on losses, numbers reduced."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hybrid5d.data.types import Document, MicroBatch, StepBatch, column_names, outside_vocabulary
from hybrid5d.engine.collate import real_rows, real_tokens, valid_tokens
from hybrid5d.engine.deepspeed.distributed import device_type
from hybrid5d.engine.objective import Objective
from hybrid5d.errors import DataError
from hybrid5d.models.batch import LocalBatch
from hybrid5d.parallel.agree import gather_objects, world_axis
from hybrid5d.parallel.collectives import sum_scalars
from hybrid5d.parallel.context import ParallelContext
from hybrid5d.plan.lr import LRSchedule

MEMORY = "memory_"  # what names of device memory in a result's metrics begin with


@contextmanager
def own_modes(grad: bool = True) -> Iterator[None]:
    """torch's modes as the engine needs them, whatever the caller has set: gradients, fp32 defaults, no autocast."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False), torch.set_grad_enabled(grad), torch.autocast(device_type(), enabled=False):
            yield
    finally:
        torch.set_default_dtype(default)


@dataclass(frozen=True)
class Counts:
    """Tokens of a step, before any cut or padding.

    Attributes:
        valid: with a label, over all dp ranks; tokens: of real rows, likewise.
        rows: documents that are no filling, over all dp ranks.
        places: token places that are computed, padding and filling included, likewise.
        local, local_rows: with a label, and such documents, in each micro-batch of this dp rank.
    """

    valid: int
    tokens: int
    rows: int
    places: int
    local: tuple[int, ...]
    local_rows: tuple[int, ...]


def count_tokens(
    micro_batches: Sequence[MicroBatch], vocab_size: int, ctx: ParallelContext, device: torch.device,
    places: Callable[[MicroBatch], int], needs: Sequence[str] = (),
) -> Counts:  # fmt: skip
    """Count what the loss is the mean of. One all-reduce over dp.

    Args:
        places: of a micro-batch that the model can take, all cp ranks together.

    Raises:
        DataError: on every rank, for a row of any that the model cannot take or that lacks a column of `needs`, and for
            a micro-batch without rows.
    """
    fault = next(filter(None, (_fault(mb, vocab_size, needs) for mb in micro_batches)), None)
    local = () if fault else tuple(map(valid_tokens, micro_batches))
    local_rows = () if fault else tuple(map(real_rows, micro_batches))
    tokens = 0 if fault else sum(map(real_tokens, micro_batches))
    computed = 0 if fault else sum(map(places, micro_batches))
    mine = [sum(local), tokens, sum(local_rows), computed, int(fault is not None)]
    valid, tokens, rows, computed, failed = sum_scalars(mine, ctx.dp, device)
    if failed:
        raise DataError(f"data: {fault or 'a row of another dp rank does not fit the model'}")
    return Counts(valid, tokens, rows, computed, local, local_rows)


def _fault(micro_batch: MicroBatch, vocab_size: int, needs: Sequence[str]) -> str | None:
    """Why the model cannot take a micro-batch."""
    for row in micro_batch:
        if not isinstance(row, Sequence):
            return f"a row is a {type(row).__name__}; write a tuple of documents, also for one"
    documents = [d for row in micro_batch for d in row]
    if not all(sum(len(d) for d in row) for row in micro_batch or ((),)):
        return "a micro-batch without a row, or a row without a token"
    try:
        column_names(documents)
    except DataError as exc:
        return str(exc)
    for d in documents:
        fault = _document_fault(d, vocab_size)
        missing = [name for name in needs if name not in d.columns]
        if fault is None and missing and valid_tokens(((d,),)):
            fault = f"row {d.row_id}: no column {missing[0]}, which the loss needs"
        if fault:
            return fault
    return None


def _document_fault(document: Document, vocab_size: int) -> str | None:
    """What is no array of integers as long as the others; a vocabulary cut over tp would give ids beyond it zeros."""
    name = f"row {document.row_id}"
    for key in ("input_ids", "labels", "position_ids"):
        values = getattr(document, key)
        if values is None and key == "position_ids":
            continue
        if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iu":
            array = isinstance(values, np.ndarray)
            kind = f"{values.dtype}{list(values.shape)}" if array else f"a {type(values).__name__}"
            return f"{name}: {key} must be a numpy array [n] of integers, not {kind}"
        if len(values) != len(document):
            return f"{name}: {len(values)} {key} for {len(document)} input_ids"
        fault = outside_vocabulary(key, values, vocab_size) if key != "position_ids" else None
        if fault:
            return f"{name}: {fault}"
    return None


def check_agreement(batch: StepBatch, ctx: ParallelContext) -> None:
    """Refuse ranks of one dp replica that hold different rows, before anything trains on a mixture.

    Collective over the world.

    Raises:
        DataError: on every rank; also where dp ranks have different numbers of micro-batches.
    """
    everyone = gather_objects((_checksum(batch.micro_batches), len(batch.micro_batches)), world_axis())
    by_dp: dict[int, dict[int, list[int]]] = {}
    for rank, (value, _) in enumerate(everyone):
        by_dp.setdefault(ctx.layout.coordinate(rank).dp, {}).setdefault(value, []).append(rank)
    for dp_rank, groups in by_dp.items():
        if len(groups) > 1:
            sets = " and ".join(str(ranks) for ranks in groups.values())
            raise DataError(f"data: ranks {sets} belong to dp rank {dp_rank} but were given different rows")
    sizes = [count for _, count in everyone]
    if len(set(sizes)) > 1:
        raise DataError(f"data: dp ranks were given different numbers of micro-batches: {sizes}")


def _checksum(micro_batches: Sequence[MicroBatch]) -> int:
    value = 0
    for row in (row for mb in micro_batches for row in mb):
        for d in row if isinstance(row, Sequence) else ():  # what is no row is refused later
            content = (d.input_ids, d.labels, d.position_ids, *(x for item in sorted(d.columns.items()) for x in item))
            for part in content:
                value = zlib.crc32(repr(part if part is None else np.asarray(part).tolist()).encode(), value)
    return value


def loss_scales(counts: Counts, objective: Objective, normalization: str, divisor: int, dp: int) -> list[float]:
    """Factor on each micro-batch's loss sum, so that the sum over all of them divided by `divisor` is the mean.

    `divisor`: what DeepSpeed divides gradients by. `normalization`: `token`, the mean over the tokens (or rows) of the
    global batch; or `micro_batch`, the mean over micro-batches of each one's mean, as RLinf averages.
    """
    tokens = objective.unit == "tokens"
    total, local = (counts.valid, counts.local) if tokens else (counts.rows, counts.local_rows)
    share = divisor * objective.factor
    if normalization == "micro_batch":
        means = len(local) * dp
        return [share / (means * max(n, 1)) for n in local]
    return [share / max(total, 1)] * len(local)


def reported(batches: Sequence[LocalBatch], scales: Sequence[float], objective: Objective) -> list[float]:
    """This rank's sums of what the rule reports: its means, then its parts under the factors of the loss."""
    rule = objective.rule
    means = [sum(float(b.means.get(name, 0.0)) for b in batches) for name in rule.means]
    parts = [sum(float(b.parts.get(name, 0.0)) * scale for b, scale in zip(batches, scales)) for name in rule.parts]
    return [*means, *parts]


def set_schedule(optimizer: Any, schedule: LRSchedule, step: int) -> float:
    """Give the optimizer the learning rate (returned) and weight decay of a step (0 = the first)."""
    lr, decay = schedule.lr(step), schedule.weight_decay(step)
    for group in optimizer.param_groups:
        group["lr"] = lr
        if group.get("name") == "decay":
            group["weight_decay"] = decay
    return lr


def sum_over_model(values: Sequence[float], ctx: ParallelContext, device: torch.device) -> list[float]:
    """Sums over tokens, known to every rank: over dp x cp, and over pp, as only the last stage has any.

    tp ranks hold equal values already.
    """
    found = [float(v) for v in values]  # stages without the head may hold the int 0: the others' dtype all the same
    for axis in (ctx.dp_cp, ctx.pp):
        found = sum_scalars(found, axis, device)
    return found


def device_memory(device: torch.device) -> dict[str, float]:
    """CUDA: bytes that tensors and torch's allocator held at the peak since the step before; all in use on the device.

    The last has what torch does not know of: CUDA's context, NCCL's buffers, other processes.
    """
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {
        f"{MEMORY}allocated_bytes": float(torch.cuda.max_memory_allocated(device)),
        f"{MEMORY}reserved_bytes": float(torch.cuda.max_memory_reserved(device)),
        f"{MEMORY}device_bytes": float(total - free),
    }


def start_memory_peak(device: torch.device) -> None:
    """The next `device_memory` is about what comes from here on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Peak of device memory on CUDA, of the resident set on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
