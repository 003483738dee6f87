"""Where gradients accumulate in each of DeepSpeed's optimizers, and the reduction of ZeRO 1 in fp32.

ZeRO 1 of DeepSpeed allocates gradients anew each step, copies them into buckets, reduces whole buckets and copies its
part out (deepspeed.md: Copies of gradients). In fp32 one buffer per group, laid out as the group's flat weights, takes
their place: gradients accumulate in it, each part of it is reduced to the rank that updates those weights, which uses
it where it lies.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import GradPartitionBufferGroup
from torch import Tensor

from hybrid5d.parallel.collectives import reduce_to
from hybrid5d.parallel.context import Axis
from hybrid5d.tensor_parallel import Place


class OptimizerGradients:
    """Gradients of an optimizer that keeps them itself: `.grad`, or the bf16 optimizer's fp32 buffer."""

    divides = True  # the reduction is a mean over dp x cp

    def __init__(self, optimizer: Any):
        self.optimizer = optimizer
        self._at: dict[Tensor, tuple[int, int]] = {}
        if isinstance(optimizer, BF16_Optimizer):
            groups = enumerate(optimizer.bf16_groups)
            self._at = {p: (i, j) for i, group in groups for j, p in enumerate(group)}

    def place(self, param: Tensor) -> Place:
        """See `WeightGradients`."""
        if param in self._at:
            i, j = self._at[param]
            total = self.optimizer.fp32_groups_gradients[i][j]
            param._hp_grad = total  # type: ignore[attr-defined]
            self.optimizer.fp32_groups_has_gradients[i][j] = True
            return Place(total.view(param.shape), False)
        fresh = param.grad is None
        if param.grad is None:
            param.grad = torch.empty_like(param)
        return Place(param.grad, fresh)

    def gradient(self, param: Tensor) -> Tensor | None:
        """The gradient that the optimizer will reduce and use (deepspeed.md: Where the gradient is)."""
        if self._at:
            flat = getattr(param, "_hp_grad", None)  # one-dimensional, a view of the buffer of its group
            return None if flat is None else flat.view(param.shape)
        if self.optimizer.use_grad_accum_attribute:
            return getattr(param, "grad_accum", None)
        return param.grad

    def start(self) -> None:
        """Before the first backward pass of a step."""

    def before_backward(self) -> None:
        """The bf16 optimizer adds up `.grad` after each pass: clear it."""
        if self._at:
            self.optimizer.clear_lp_grads()

    def after_backward(self, products_only: bool = False) -> None:
        """Move `.grad` to where it accumulates; the bf16 optimizer's products are there already."""
        if self._at:
            if not products_only:
                self.optimizer.update_hp_grads(clear_lp_grads=False)
        elif self.optimizer.use_grad_accum_attribute:
            self.optimizer.fill_grad_accum_attribute()

    def settle(self) -> None:
        """After the last backward pass of a step."""


class FlatGradients(OptimizerGradients):
    """fp32 gradients of ZeRO 1 in persistent buffers; reduces them itself.

    Args:
        dp_cp: the ranks that the optimizer cuts over.
        bucket: elements of one message of the reduction.
    """

    divides = False  # sums: the loss is scaled to give the gradient of the mean

    def __init__(self, optimizer: Any, dp_cp: Axis, bucket: int):
        super().__init__(optimizer)
        self.dp_cp, self.bucket = dp_cp, max(bucket, 1)
        for hook in optimizer._grad_acc_hooks:  # they would fill buckets
            hook.remove()
        self.flats = [torch.zeros_like(flat) for flat in optimizer.bit16_groups_flat]
        self._views: dict[Tensor, Tensor] = {}
        for i, flat in enumerate(self.flats):
            for param, offset in zip(optimizer.round_robin_bit16_groups[i], optimizer.round_robin_bit16_offsets[i]):
                self._views[param] = flat.narrow(0, offset, param.numel()).view(param.shape)
        cut = [flat.chunk(dp_cp.size) for flat in self.flats]  # DeepSpeed pads groups to whole parts
        self._parts = [[(r, x) for r, part in enumerate(parts) for x in part.split(self.bucket)] for parts in cut]
        self._handed = [self._as_read(i, parts[dp_cp.rank]) for i, parts in enumerate(cut)]

    @staticmethod
    def fit(optimizer: Any) -> bool:
        """Whether an optimizer is ZeRO 1 of DeepSpeed, in fp32 on the model's device."""
        plain = not isinstance(optimizer, BF16_Optimizer)
        return plain and optimizer.dtype == optimizer.gradient_accumulation_dtype == torch.float32 and not (
            optimizer.partition_gradients or optimizer.cpu_offload
        )  # fmt: skip

    def place(self, param: Tensor) -> Place:
        """A parameter without `.grad` has none yet: its view holds the last step's."""
        if param.grad is None:
            param.grad = self._views[param]
            return Place(param.grad, True)
        return Place(param.grad, False)

    def start(self) -> None:
        """Zero what autograd adds to: vectors. Matrices are written whole by their first product."""
        for param, view in self._views.items():
            if param.dim() < 2:
                param.grad = view.zero_()

    def settle(self) -> None:
        """Every parameter's gradient lies in its view: zero where there was none, copied where autograd made one."""
        for param, view in self._views.items():
            if param.grad is None:
                param.grad = view.zero_()
            elif param.grad is not view:
                param.grad = view.copy_(param.grad)

    def reduce(self) -> None:
        """Sum each rank's part of the buffers over dp x cp for that rank, and hand it to the optimizer."""
        for i, parts in enumerate(self._parts):
            for owner, part in parts:
                reduce_to(part, self.dp_cp, owner)
            self.optimizer.averaged_gradients[i] = self._handed[i]
        for param in self._views:
            param.grad = None

    def _as_read(self, group: int, flat: Tensor) -> GradPartitionBufferGroup:
        """A partition as the optimizer reads it: its parameters' parts, then the flat tensor that it updates with."""
        o, me = self.optimizer, self.dp_cp.rank
        parts = []
        for param in o.params_in_partition[group]:
            of = o.get_param_id(param)
            source, at = (int(x[group][me][of]) for x in (o.grad_start_offset, o.grad_partition_insertion_offset))
            parts.append(flat.narrow(0, at, min(param.numel() - source, flat.numel() - at)))
        return GradPartitionBufferGroup(parts, flat)
