"""DeepSpeed: AutoTP of transformers' Llama."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from peers.decoder import Step, labelled, loss_sum, shifted
from peers.deepspeed_dp import engine_of


def build(folder: str, variant: str, rows: Tensor) -> Step:
    """All rows on every rank."""
    assert variant == "autotp"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    engine = engine_of(model, len(rows), tensor_parallel={"autotp_size": dist.get_world_size()})
    tokens, labels = labelled(rows), shifted(rows)

    def step() -> tuple[float, float]:
        total = 0.0
        for row, label in zip(rows, labels):
            loss = loss_sum(engine(row[None]).logits, label) / tokens
            engine.backward(loss * len(rows))
            engine.step()
            total += loss.item()
        return total, float(engine.get_global_grad_norm())

    return step
