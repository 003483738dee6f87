"""How much of the devices' peak a step reached, and of what `plan` says of memory."""

from __future__ import annotations

import torch

from hybrid5d.engine.results import BatchResult
from hybrid5d.plan.flops import per_token
from hybrid5d.plan.hardware import Hardware, hardware_of, load_hardware
from hybrid5d.plan.job import job_of, spec_of
from hybrid5d.plan.memory import stage_memory
from hybrid5d.plan.run import RunPlan


def device_hardware(device: torch.device) -> Hardware | None:
    """What `plan` knows of a rank's card; None for a CPU and for cards that hardware.yaml does not name."""
    return hardware_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def memory_line(plan: RunPlan, measured: int, device: torch.device) -> str:
    """The most memory that a rank took, beside what `plan` says of its tensors."""
    what = "on the device" if device.type == "cuda" else "resident, with the process's libraries"
    line = f"memory: {measured / 2**30:.2f} GiB {what}, on the fullest rank"
    job = job_of(plan, plan.layout.world_size)
    if job is None:
        return line
    planned = max(stage_memory(job, rank, load_hardware("cpu")).allocated for rank in range(plan.layout.pp))
    return f"{line}; planned {planned / 2**30:.2f} GiB of tensors"


class Utilization:
    """MFU of a supervised step: model FLOPs (causal, nothing that is computed again) over the peak of all ranks.

    Rows count as full ones of the run's length, as in `plan`.

    Args:
        hardware: of the ranks' devices; None: no peak is known, and there is no MFU.
    """

    def __init__(self, plan: RunPlan, hardware: Hardware | None):
        spec, length, self._per_token, self._peak = spec_of(plan), plan.config.row_length, 0.0, 0.0
        if spec is None or length is None or hardware is None or plan.config.is_rl:
            return
        if plan.precision.dtype in hardware.peak_tflops:
            self._per_token = per_token(spec, length)
            self._peak = hardware.peak(plan.precision.dtype) * plan.layout.world_size

    def mfu(self, result: BatchResult) -> float | None:
        """Of a step; None where a figure is missing."""
        if not self._peak or result.step_time_s <= 0:
            return None
        return self._per_token * result.tokens / (result.step_time_s * self._peak)
