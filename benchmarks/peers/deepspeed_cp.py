"""DeepSpeed: Ulysses (its DistributedAttention), gradients by its ZeRO 1."""

from __future__ import annotations

import torch
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
from torch import Tensor

from peers.decoder import Decoder, Step, causal, labelled, shifted
from peers.deepspeed_dp import data_parallel


class Local(torch.nn.Module):
    """Attention of all tokens over this rank's heads, [b, S, heads, head_dim]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2).contiguous()


def build(folder: str, variant: str, rows: Tensor) -> Step:
    """A run of every row on each rank."""
    assert variant == "ulysses"
    ulysses = DistributedAttention(Local(), dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = ulysses(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), 0)
        return out.transpose(1, 2)

    at = torch.arange(rows.shape[1]).chunk(dist.get_world_size())[dist.get_rank()]
    return data_parallel(Decoder(folder, at, attend=attend), rows[:, at], shifted(rows)[:, at], labelled(rows))
