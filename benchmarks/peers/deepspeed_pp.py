"""DeepSpeed: PipelineModule with its own 1F1B."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import Tensor

from peers.decoder import Decoder, Step, labelled, loss_sum, shifted
from peers.deepspeed_dp import engine_of, start


def build(folder: str, variant: str, rows: Tensor) -> Step:
    """The model as a list of layers cut evenly; embedding and head are layers of their own."""
    assert variant == "1f1b"
    start()
    layers = json.loads(Path(folder, "config.json").read_text())["num_hidden_layers"]
    positions, micro_batches = torch.arange(rows.shape[1]), len(rows)
    spans = [range(0), *(range(i, i + 1) for i in range(layers)), range(0)]
    parts = [Decoder(folder, positions, span, first=i == 0, last=i == len(spans) - 1) for i, span in enumerate(spans)]
    scale = micro_batches / labelled(rows)  # DeepSpeed takes the mean over the micro-batches
    module = PipelineModule(
        parts,
        num_stages=dist.get_world_size(),
        loss_fn=lambda out, label: loss_sum(out, label) * scale,
        partition_method="uniform",
        activation_checkpoint_interval=0,
    )
    engine = engine_of(module, micro_batches)
    batch = [(row[None], label[None]) for row, label in zip(rows, shifted(rows))]

    def step() -> tuple[float, float]:
        loss = engine.train_batch(iter(batch))
        return float(loss), float(engine.get_global_grad_norm())

    return step
