"""Documents dealt over dp for a forward pass, and its per-token results put back where the documents' tokens stand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hybrid5d.data.balance import budget_micro_batches
from hybrid5d.data.loader import dummy_document
from hybrid5d.data.types import Document, MicroBatch
from hybrid5d.engine.collate import SequenceOptions, rows_of, sequence_plan
from hybrid5d.engine.results import TokenLogprobs
from hybrid5d.parallel.agree import world_axis
from hybrid5d.parallel.collectives import all_gather_seq, all_reduce
from hybrid5d.parallel.context import Axis, ParallelContext


def deal(documents: Sequence[Document], dp: Axis, size: int, budget: int | None = None) -> list[MicroBatch]:
    """This dp rank's micro-batches of `size` rows; row_id says which document of the list each is.

    With a token budget each micro-batch is one packed row of as many documents as it holds. Short ranks get dummies
    (row_id -1), so that all run the same number.
    """
    numbered = [replace(d, row_id=i) for i, d in enumerate(documents)]
    if budget is not None and max(map(len, numbered), default=0) <= budget:
        parts = budget_micro_batches([len(d) for d in numbered], dp.size, budget)[dp.rank]
        return [(tuple(numbered[i] for i in part) or (dummy_document(),),) for part in parts]
    per_rank = -(-len(numbered) // (dp.size * size)) * size
    mine = numbered[dp.rank * per_rank : (dp.rank + 1) * per_rank]
    mine += [dummy_document()] * (per_rank - len(mine))
    return [tuple((d,) for d in mine[i : i + size]) for i in range(0, per_rank, size)]


def collect(
    documents: Sequence[Document],
    results: Iterable[tuple[MicroBatch, tuple[Tensor, Tensor]]],
    ctx: ParallelContext,
    options: SequenceOptions,
    device: torch.device,
) -> list[TokenLogprobs]:
    """Every document's values on every rank, from the [b, S/cp] ones of this rank's micro-batches (last stage only).

    Gathers over cp; each token is then written by one rank of the world, and a sum over the world is all of them.
    """
    flat = np.zeros((2, sum(len(d) for d in documents)), dtype=np.float32)
    starts = np.cumsum([0, *(len(d) for d in documents)])
    for micro_batch, (logprobs, entropy) in results:
        whole = all_gather_seq(torch.stack((logprobs, entropy), -1), ctx.cp).wait().cpu().numpy()
        if ctx.tp.rank or ctx.cp.rank:
            continue  # these ranks hold equal values; one of them contributes
        plan = sequence_plan(micro_batch, ctx, options)
        index = np.concatenate([plan.source_index(r) for r in range(ctx.cp.size)], axis=1)
        for r, row in enumerate(rows_of(micro_batch, options)):
            values = np.zeros((sum(len(d) for d in row), 2), dtype=np.float32)
            real = index[r] >= 0
            values[index[r][real]] = whole[r][real]
            at = 0
            for document in row:
                if document.row_id >= 0:
                    begin = starts[document.row_id]
                    flat[:, begin : begin + len(document)] = values[at : at + len(document)].T
                at += len(document)
    summed = all_reduce(torch.from_numpy(flat).to(device), world_axis()).wait().cpu().numpy()
    return [TokenLogprobs(summed[0, a:b], summed[1, a:b]) for a, b in pairwise(starts)]
