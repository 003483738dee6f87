"""fp32 masters and optimizer moments of DeepSpeed's ZeRO optimizers, seen parameter by parameter.

ZeRO cuts each flat group over dp x cp, so a rank holds a flat run of a parameter's elements, or none; which one, each
optimizer says in its own way (deepspeed.md: Where it lies).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from hybrid5d.checkpoint.manifest import WEIGHT
from hybrid5d.parallel.collectives import reduce_to
from hybrid5d.parallel.context import Axis

_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")  # of DeepSpeed's DynamicLossScaler


@dataclass(frozen=True)
class Fragment:
    """Elements start.. of a flattened parameter; `values` is a view of the optimizer's own memory."""

    start: int
    values: Tensor

    def copy_from(self, full: Tensor) -> None:
        """Overwrite with this fragment's part of the whole parameter's values."""
        self.values.copy_(full.reshape(-1)[self.start : self.start + self.values.numel()])


class OptimizerState:
    """Masters and moments of one engine; a `checkpoint.state.OptimizerAccess`.

    Args:
        optimizer: DeepSpeed's ZeRO optimizer.
        dp_cp: the ranks it cuts over.
    """

    def __init__(self, optimizer: Any, dp_cp: Axis):
        self.optimizer, self.dp_cp = optimizer, dp_cp
        self.base: torch.optim.Optimizer = optimizer.optimizer
        self.stage3 = hasattr(optimizer, "fp32_partitioned_groups_flat")

    @property
    def name(self) -> str:
        return type(self.base).__name__

    # --- flat partitions --------------------------------------------------------------------------------------------

    @property
    def flats(self) -> list[Tensor]:
        """This rank's fp32 partitions: the keys of the base optimizer's state."""
        for attribute in (
            "fp32_partitioned_groups_flat",
            "single_partition_of_fp32_groups",
            "fp32_groups_flat_partition",
        ):
            if hasattr(self.optimizer, attribute):
                return list(getattr(self.optimizer, attribute))
        raise TypeError(f"{type(self.optimizer).__name__} is no ZeRO optimizer of DeepSpeed 0.19.8")

    def moments(self) -> tuple[str, ...]:
        """Names of the moments that exist now (none before the first step, none for plain SGD)."""
        found: dict[str, None] = {}
        for flat in self.flats:
            for key, value in self.base.state.get(flat, {}).items():
                if isinstance(value, Tensor) and value.shape == flat.shape and value.dim():
                    found[key] = None
        return tuple(sorted(found))

    @staticmethod
    def shape(param: nn.Parameter) -> torch.Size:
        """Shape of the local parameter; ZeRO 3 leaves `param.shape` empty."""
        return getattr(param, "ds_shape", param.shape)

    def holds(self, param: nn.Parameter, kind: str) -> bool:
        """Whether a part of these values is kept here."""
        return self.fragment(param, kind) is not None

    def fragment(self, param: nn.Parameter, kind: str) -> Fragment | None:
        """This rank's part of a parameter's master (`weight`) or moment; None where it has none."""
        if self.stage3:
            group, offset, numel = self.optimizer.grad_position[self.optimizer.get_param_id(param)]
            start = numel * self.optimizer._get_param_partition_rank(param)
            numel = min(numel, prod(self.shape(param)) - start)  # the last ranks' partitions end in padding
            if numel <= 0:
                return None
        else:
            mapping = getattr(param, "_hp_mapping", None)
            if mapping is None:
                return None
            group, address = mapping.param_group_index, mapping.get_hp_fragment_address()
            offset, numel, start = address.start, address.numel, mapping.lp_fragment_address.start
        flat = self.flats[group]
        store = flat if kind == WEIGHT else self.base.state[flat][kind]
        return Fragment(start, store.detach().narrow(0, offset, numel))

    # --- reading ----------------------------------------------------------------------------------------------------

    def gather(self, param: nn.Parameter, kind: str, owner: int) -> Tensor | None:
        """The whole local parameter's values on dp_cp rank `owner`, None elsewhere. Collective over dp_cp."""
        shape = self.shape(param)
        if kind == WEIGHT and not param.requires_grad:
            values = self._weights(param)  # collective under ZeRO 3
            return values if self.dp_cp.rank == owner else None
        if kind == WEIGHT and not self.stage3 and param.dtype == torch.float32:
            return param.detach() if self.dp_cp.rank == owner else None  # the weights are the masters
        fragment = self.fragment(param, kind)
        if self.dp_cp.size == 1 and fragment is not None and fragment.values.numel() == shape.numel():
            return fragment.values.view(shape)
        # On the model's device even where the optimizer's memory is the host's: NCCL has no other.
        whole = torch.zeros(shape.numel(), dtype=torch.float32, device=param.device)
        if fragment is not None:
            whole[fragment.start : fragment.start + fragment.values.numel()] = fragment.values
        reduce_to(whole, self.dp_cp, owner)
        return whole.view(shape) if self.dp_cp.rank == owner else None

    def _weights(self, param: nn.Parameter) -> Tensor:
        if not self.stage3:
            return param.detach()
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        with GatheredParameters([param]):
            return param.detach().clone()

    def step(self) -> int:
        """The optimizer's own count of updates (Adam's t)."""
        for flat in self.flats:
            if "step" in self.base.state.get(flat, {}):
                return int(self.base.state[flat]["step"])
        return int(self.base.param_groups[0].get("step", 0))

    def loss_scaler(self) -> dict[str, Any]:
        """The dynamic fp16 loss scale and its counters; empty where there is none."""
        if not dynamic_scale(self.optimizer):
            return {}
        return {name: getattr(self.optimizer.loss_scaler, name) for name in _SCALER}

    # --- writing ----------------------------------------------------------------------------------------------------

    def reset(self, moments: tuple[str, ...], step: int) -> None:
        """Replace every partition's state by zeroed moments and a step count; by nothing where `moments` is empty."""
        self.base.state.clear()
        for flat in self.flats if moments else ():
            state = self.base.state[flat] = {}
            for key in moments:
                state[key] = torch.zeros_like(flat, requires_grad=False)
            if self.name.startswith("Fused"):
                continue  # DeepSpeed's kernel keeps its count in the group
            if "exp_avg" in moments:
                plain = type(self.base).__module__.startswith("torch.")
                fused = any(group.get("fused") for group in self.base.param_groups)  # wants it beside the moments
                device = flat.device if fused else None
                state["step"] = torch.tensor(float(step), device=device) if plain else step
        for group in self.base.param_groups:
            if self.name.startswith("Fused"):
                group["step"] = step
        # Views of the moments that ZeRO 1, 2 and bf16 made are of the old ones (deepspeed.md: After loading).
        self.optimizer._hp_optimizer_states_linked = False

    def set(self, param: nn.Parameter, kind: str, full: Tensor) -> None:
        """Overwrite this rank's part of a master or moment, and for `weight` the model's own copy as well."""
        if kind == WEIGHT:
            self._set_weights(param, full)
        if param.requires_grad:
            fragment = self.fragment(param, kind)
            if fragment is not None:
                fragment.copy_from(full)

    def _set_weights(self, param: nn.Parameter, full: Tensor) -> None:
        if not hasattr(param, "ds_tensor"):
            param.data.copy_(full)
            return
        local = param.ds_tensor
        start = local.numel() * self.optimizer._get_param_partition_rank(param)
        part = full.reshape(-1)[start : start + local.numel()]
        local.data.view(-1)[: part.numel()].copy_(part)
        if param.data.numel() == full.numel():  # small parameters stay whole on every rank
            param.data.copy_(full.view_as(param.data))

    def set_loss_scaler(self, numbers: dict[str, Any]) -> None:
        """Restore what `loss_scaler` gave, where this run adapts its scale too; window and limits are its own."""
        if dynamic_scale(self.optimizer):
            scaler = self.optimizer.loss_scaler
            for name in _SCALER:
                setattr(scaler, name, numbers.get(name, getattr(scaler, name)))


def loss_scale(optimizer: Any) -> float:
    """fp16's factor on the loss as it is now, 1 in other precisions."""
    scaler = getattr(optimizer, "loss_scaler", None)
    return 1.0 if scaler is None else float(scaler.cur_scale)


def dynamic_scale(optimizer: Any) -> bool:
    """Whether it adapts a loss scale: fp16 without `loss_scale`."""
    return bool(getattr(getattr(optimizer, "loss_scaler", None), "dynamic", False))
