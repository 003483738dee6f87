"""DeepSpeed: ZeRO stage 1 with its own engine."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from peers.decoder import MAX_NORM, Decoder, Step, adamw, labelled, loss_sum, shifted, summed


def start() -> None:
    """Give DeepSpeed the process group that is there."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its own would be compiled now
    deepspeed.init_distributed(verbose=False)


def engine_of(module: nn.Module, micro_batches: int, **config: Any) -> Any:
    """DeepSpeed's engine over a module, with the optimizer that every peer has."""
    start()
    return deepspeed.initialize(
        model=module,
        optimizer=adamw(module),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": micro_batches,
            "gradient_clipping": MAX_NORM,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1_000_000,
            **config,
        },
    )[0]


def data_parallel(module: nn.Module, rows: Tensor, labels: Tensor, tokens: int) -> Step:
    """Steps on this rank's rows; `tokens` are labelled in the batch of all ranks."""
    engine, scale = engine_of(module, len(rows)), len(rows) * dist.get_world_size()

    def step() -> tuple[float, float]:
        total = 0.0
        for row, label in zip(rows, labels):
            loss = loss_sum(engine(row[None]), label) / tokens
            engine.backward(loss * scale)  # DeepSpeed divides by micro-batches and ranks
            engine.step()
            total += loss.item()
        return summed(total), float(engine.get_global_grad_norm())

    return step


def build(folder: str, variant: str, rows: Tensor) -> Step:
    """Every other row is this rank's."""
    assert variant == "zero1"
    mine = rows[dist.get_rank() :: dist.get_world_size()]
    return data_parallel(Decoder(folder, torch.arange(rows.shape[1])), mine, shifted(mine), labelled(rows))
