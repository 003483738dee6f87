"""torch: its ring attention template over aten's flash attention for CPUs (`context_parallel()` has no path there)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as template

from peers.decoder import Decoder, Step, labelled, shifted
from peers.torch_dp import data_parallel

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Ring(torch.autograd.Function):
    """torch's ring, made differentiable."""

    @staticmethod
    def forward(ctx: Any, *qkv: Tensor) -> Tensor:
        group = dist.group.WORLD
        out, lse, *_ = template._templated_ring_attention(group, 2, FORWARD, *qkv, is_causal=True)
        ctx.save_for_backward(*qkv, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv, *_ = template._templated_ring_attention_backward(
            dist.group.WORLD, 2, BACKWARD, grad, "grad_out", q, k, v, out, lse, is_causal=True, dropout_p=0.0
        )
        return dq, dk, dv


def zigzag(length: int) -> Tensor:
    """Positions of this rank: chunk r from the front and chunk r from the back of 2 x ranks, as torch balances."""
    chunks = torch.arange(length).chunk(2 * dist.get_world_size())
    return torch.cat((chunks[dist.get_rank()], chunks[-1 - dist.get_rank()]))


def build(folder: str, variant: str, rows: Tensor) -> Step:
    """Each rank has part of every row; gradients go the way of data parallelism."""
    assert variant == "ring"
    at = zigzag(rows.shape[1])
    decoder = Decoder(folder, at, attend=Ring.apply)
    return data_parallel(decoder, rows[:, at], shifted(rows)[:, at], labelled(rows))
