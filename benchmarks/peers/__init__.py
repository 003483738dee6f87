"""What others' libraries take for the same step: one small adapter each, same weights, same rows, same optimizer.

A module here has `build(folder, variant, rows) -> step`: `folder` is a Hugging Face folder, `rows` the global batch
[rows, length] of ids, one row a micro-batch, and `step()` does one optimizer step (token mean over the batch, gradients
clipped at 1, AdamW) and returns (loss, norm before clipping), the same on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """A peer of an axis.

    Attributes:
        module: of this package.
        variant: what `build` is asked for.
        label: in tables.
    """

    module: str
    variant: str
    label: str


PEERS: dict[str, Peer] = {
    "torch-dtensor": Peer("torch_tp", "tp", "torch DTensor"),
    "torch-dtensor-sp": Peer("torch_tp", "sp", "torch DTensor, SP"),
    "deepspeed-autotp": Peer("deepspeed_tp", "autotp", "DeepSpeed AutoTP"),
    "megatron-tp": Peer("megatron_tp", "tp", "Megatron-core"),
    "megatron-sp": Peer("megatron_tp", "sp", "Megatron-core, SP"),
    "torch-1f1b": Peer("torch_pp", "1f1b", "torch 1F1B"),
    "torch-interleaved": Peer("torch_pp", "interleaved", "torch interleaved 1F1B"),
    "torch-zbv": Peer("torch_pp", "zbv", "torch ZBV"),
    "deepspeed-1f1b": Peer("deepspeed_pp", "1f1b", "DeepSpeed 1F1B"),
    "torch-ring": Peer("torch_cp", "ring", "torch ring attention"),
    "deepspeed-ulysses": Peer("deepspeed_cp", "ulysses", "DeepSpeed Ulysses"),
    "torch-zero1": Peer("torch_dp", "zero1", "torch DDP + ZeroRedundancyOptimizer"),
    "deepspeed-zero1": Peer("deepspeed_dp", "zero1", "DeepSpeed ZeRO 1"),
}
