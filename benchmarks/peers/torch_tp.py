"""torch DTensor: tensor parallelism by parallelize_module, with and without its sequence parallelism; loss parallel."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from peers.decoder import Decoder, Step, adamw, clip, labelled, loss_sum, shifted


def styles(sequence: bool) -> dict[str, ParallelStyle]:
    """How each module is cut; `sequence`: what lies between the cut products is cut along the sequence."""
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, ParallelStyle] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"layers.*.{name}"] = RowwiseParallel(output_layouts=between)
    if sequence:
        plan |= {f"layers.*.{name}": SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
        plan["norm"] = SequenceParallel()
        one, two = (Shard(1),), (Shard(1), None)
        plan["layers.*.self_attn"] = PrepareModuleInput(
            input_layouts=two, desired_input_layouts=(Replicate(), None), use_local_output=True
        )
        plan["layers.*.mlp"] = PrepareModuleInput(
            input_layouts=one, desired_input_layouts=(Replicate(),), use_local_output=True
        )
    return plan


def build(folder: str, variant: str, rows: Tensor) -> Step:
    """All rows on every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Decoder(folder, torch.arange(rows.shape[1]))
    parallelize_module(model, mesh, styles(variant == "sp"))
    optimizer, tokens, labels = adamw(model), labelled(rows), shifted(rows)

    def step() -> tuple[float, float]:
        optimizer.zero_grad()
        total = 0.0
        for row, label in zip(rows, labels):
            with loss_parallel():
                loss = loss_sum(model(row[None]), label) / tokens
                loss.backward()
            total += float(loss.full_tensor() if isinstance(loss, DTensor) else loss)
        cut, whole = [], []
        for p in model.parameters():
            if not isinstance(p, DTensor):
                whole.append(p.grad)
                continue
            p.grad = p.grad.redistribute(placements=p.placements)  # sums what norms got on each rank
            (cut if p.placements[0].is_shard() else whole).append(p.grad.to_local())
        norm = clip(cut, whole)
        optimizer.step()
        return total, norm

    return step
