"""torch: DistributedDataParallel and ZeroRedundancyOptimizer."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from peers.decoder import LEARNING_RATE, MAX_NORM, Decoder, Step, groups, labelled, loss_sum, shifted, summed


def data_parallel(decoder: Decoder, rows: Tensor, labels: Tensor, tokens: int) -> Step:
    """Steps of a decoder on this rank's `rows`; `tokens` are labelled in the batch of all ranks."""
    model, size = DistributedDataParallel(decoder, gradient_as_bucket_view=True), dist.get_world_size()
    optimizer = ZeroRedundancyOptimizer(
        groups(model.named_parameters()), torch.optim.AdamW, lr=LEARNING_RATE, fused=True
    )

    def step() -> tuple[float, float]:
        optimizer.zero_grad(set_to_none=False)
        total = 0.0
        for i, (row, label) in enumerate(zip(rows, labels)):
            with model.no_sync() if i + 1 < len(rows) else contextlib.nullcontext():
                loss = loss_sum(model(row[None]), label) / tokens
                (loss * size).backward()  # DDP takes the mean over the ranks
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        return summed(total), norm.item()

    return step


def build(folder: str, variant: str, rows: Tensor) -> Step:
    """Every other row is this rank's."""
    assert variant == "zero1"
    mine = rows[dist.get_rank() :: dist.get_world_size()]
    return data_parallel(Decoder(folder, torch.arange(rows.shape[1])), mine, shifted(mine), labelled(rows))
