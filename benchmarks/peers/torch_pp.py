"""torch.distributed.pipelining: 1F1B, interleaved 1F1B with two stages a rank, and the zero-bubble V."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

from peers.decoder import Decoder, Step, adamw, clip, labelled, loss_sum, shifted, summed


def spans(layers: int, stages: int) -> list[range]:
    """Runs of layers; embedding and head count as one each (torchtitan's default)."""
    counts = [(layers + 2) // stages + (i < (layers + 2) % stages) for i in range(stages)]
    counts[0] -= 1
    counts[-1] -= 1
    return [range(sum(counts[:i]), sum(counts[: i + 1])) for i in range(stages)]


def build(folder: str, variant: str, rows: Tensor) -> Step:
    """Stages of this rank under torch's schedule of that name; a row is a micro-batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = {"1f1b": [rank], "interleaved": [rank, rank + world], "zbv": [rank, 2 * world - 1 - rank]}[variant]
    stages = len(mine) * world
    layers = json.loads(Path(folder, "config.json").read_text())["num_hidden_layers"]
    parts, positions = spans(layers, stages), torch.arange(rows.shape[1])
    modules = torch.nn.ModuleList(
        Decoder(folder, positions, parts[i], first=i == 0, last=i == stages - 1) for i in mine
    )
    tokens, labels = labelled(rows), shifted(rows)
    pipeline = [PipelineStage(m, i, stages, torch.device("cpu")) for m, i in zip(modules, mine)]
    options = {
        "n_microbatches": len(rows),
        "loss_fn": lambda out, label: loss_sum(out, label) / tokens,
        "scale_grads": False,
    }
    schedule = {
        "1f1b": lambda: Schedule1F1B(pipeline[0], **options),
        "interleaved": lambda: ScheduleInterleaved1F1B(pipeline, **options),
        "zbv": lambda: ScheduleZBVZeroBubble(pipeline, **options),
    }[variant]()
    optimizer = adamw(modules)

    def step() -> tuple[float, float]:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        last = {"target": labels, "losses": losses} if stages - 1 in mine else {}
        schedule.step(*([rows] if 0 in mine else []), **last, return_outputs=False)
        norm = clip([p.grad for p in modules.parameters() if p.grad is not None])
        optimizer.step()
        return summed(sum(loss.item() for loss in losses)), norm

    return step
