"""What each key of a forecast means, and how it was computed."""

from __future__ import annotations

import json
from typing import Any

from hybrid5d.config.tree import nearest

TEXTS = {
    "layout": "degrees, rank order (tp fastest) and the groups of each axis; a group across nodes pays the network",
    "batch": "rows of an optimizer step, in our terms and in DeepSpeed's, whose batch is cp times ours",
    "stages": "decoder layers (`runs`: of each of its chunks) and weights that one tp rank of each pipeline rank holds",
    "schedule": "the step's program (plan/pipeline.py) played at unit costs F = B = W = 1",
    "schedule.live_chunks": "most chunks whose activations are alive at once, by pipeline rank",
    "schedule.idle_inside": "idle units between a rank's first and last instruction",
    "memory": "bytes on one rank of each pipeline stage; the prediction is what torch.cuda.max_memory_allocated reads",
    "memory.per_stage": "one entry a pipeline rank; kinds do not sum to `allocated`: they peak apart",
    "memory.per_stage.weights": "numbers on the rank x bytes of the precision; ZeRO 3 divides by dp x cp",
    "memory.per_stage.gradients": "fp32, one a trained weight; sharded over dp x cp from ZeRO 2 on",
    "memory.per_stage.optimizer": "fp32 master copy and moments over dp x cp, less what is offloaded",
    "memory.per_stage.activations": "tensors that the layers keep for backward (plan/memory.py lists them), times the "
    "micro-batches in flight on that rank",
    "memory.per_stage.recompute": "what one recomputed layer (or group of layers) keeps while it runs again",
    "memory.per_stage.logits": "the fused head: gradient of its input (ZeRO 2, 3: its matrix), a chunk of logits",
    "memory.per_stage.buffers": "DeepSpeed's buckets from the resolved config, and the batch's own tensors",
    "memory.per_stage.peaks": "allocated at load, at optimizer creation, inside the step, in the optimizer step",
    "memory.per_stage.reserved": "estimate: allocated and `fragmentation` of the machine's file",
    "memory.per_stage.driver": "estimate of nvidia-smi's reading: reserved, context and communicators",
    "memory.per_stage.outside": "context and communicators: outside the allocator, one entry a process group",
    "memory.host_bytes_per_node_at_load": "each rank's shard in fp32, the largest tensor whole, offloaded states",
    "traffic": "calls, payload and bytes that one rank sends in a step, by axis; plan/traffic.py",
    "flops": "training FLOPs: causal counts the scores under the mask, full all of them, counter is torch's (five "
    "products in the fused backward); hardware is causal with the forward passes that are computed again",
    "bubble": "part of the step in which a rank has nothing to do, at unit costs",
    "time": "seconds of a step: a roofline of parts with the assumptions of hardware.yaml",
    "time.parts.bubble": "idle units of the schedule times the mean time of a stage's micro-batch",
    "time.parts.data_parallel": "gradients and weights over dp x cp that do not hide behind the backward pass",
    "mfu": "model FLOPs (causal, nothing that is computed again) over the data sheet's peak of all ranks",
    "measured": "the step given with --measured: its MFU (causal) and its time over the planned one",
    "assumptions": "machine and inputs: hybrid5d/plan/hardware.yaml, or the file given with --gpu",
    "warnings": "groups across nodes, idle stages, bubble above 20 %, padding, memory near or above the card",
}


def explain(key: str, forecast: dict[str, Any]) -> str:
    """One key's meaning and value.

    Raises:
        KeyError: no such key; its text names the nearest.
    """
    path = key.replace("[]", "")
    value: Any = forecast
    for part in path.split("."):
        if isinstance(value, list) and value and isinstance(value[0], dict) and part in value[0]:
            value = [item[part] for item in value]
        elif isinstance(value, dict) and part in value:
            value = value[part]
        else:
            near = nearest(key, [*TEXTS, *forecast])
            known = f"did you mean {near}?" if near else f"known are {', '.join(forecast)} and what is in them"
            raise KeyError(f"--explain {key!r}: no such key of the forecast; {known}")
    parts = path.split(".")
    text = next(t for n in range(len(parts), 0, -1) if (t := TEXTS.get(".".join(parts[:n]))) is not None)
    return f"{key}\n  {text}\n  {json.dumps(value)}\n"
