"""Causal attention over a sequence cut by a `SequencePlan`: Ulysses outside, ring (or gathered keys) inside."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybrid5d.context_parallel.kernels import Kernel, choose_kernel
from hybrid5d.context_parallel.ring import RingSetup, attend
from hybrid5d.context_parallel.ulysses import to_heads, to_sequence
from hybrid5d.parallel.context import Axis, build_axis
from hybrid5d.parallel.messages import Traffic
from hybrid5d.plan.layout import ParallelLayout
from hybrid5d.plan.sequence import SequencePlan
from hybrid5d.plan.sequence_rules import hybrid_groups


def hybrid_axes(layout: ParallelLayout, rank: int, ulysses: int) -> tuple[Axis, Axis]:
    """(Ulysses axis, ring axis) of a rank for `a2a+p2p`; collective over the world, same order on every rank."""
    inner, outer = hybrid_groups(layout.groups("cp"), ulysses)
    return build_axis(inner, rank), build_axis(outer, rank)


class ContextParallelAttention(nn.Module):
    """Attention core of one layer. No parameters.

    Args:
        cp: the context-parallel axis, or its process group (so too the next two).
        method: one of `p2p` (ring), `a2a` (Ulysses), `a2a+p2p`, `all_gather`; the plans must be built for the same.
        ulysses, ring: the two axes of `a2a+p2p` (from `hybrid_axes`); the other methods use `cp`.
        softmax_scale: default 1/sqrt(d).
        kernel: name of a kernel, or `auto`: chosen by device and dtype of the first call (see `kernel_name`).

    Attributes:
        traffic: what this module has sent so far.
    """

    def __init__(
        self,
        cp: Axis | dist.ProcessGroup,
        method: str = "p2p",
        ulysses: Axis | dist.ProcessGroup | None = None,
        ring: Axis | dist.ProcessGroup | None = None,
        softmax_scale: float | None = None,
        kernel: str | Kernel = "auto",
    ):
        super().__init__()
        one, self.cp = Axis.single(), Axis.of(cp)
        if method == "a2a+p2p" and self.cp.size > 1:
            if ulysses is None or ring is None:
                raise ValueError("a2a+p2p needs a Ulysses and a ring axis: see hybrid_axes")
            self.ulysses, self.ring = Axis.of(ulysses), Axis.of(ring)
            if self.ulysses.size * self.ring.size != self.cp.size:
                raise ValueError(f"ulysses {self.ulysses.size} * ring {self.ring.size} must be cp {self.cp.size}")
        else:
            self.ulysses, self.ring = (self.cp, one) if method == "a2a" else (one, self.cp)
        self.method, self.softmax_scale, self.kernel = method, softmax_scale, kernel
        self.traffic = Traffic()

    def kernel_name(self, device: torch.device, dtype: torch.dtype, head_dim: int = 64) -> str:
        """The kernel that such tensors run on."""
        return self._kernel(device, dtype, head_dim).name

    def _kernel(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
        return choose_kernel(self.kernel, device, dtype, head_dim) if isinstance(self.kernel, str) else self.kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor, plan: SequencePlan, window: int | None = None) -> Tensor:
        """q [b, S/cp, nq, d], k, v [b, S/cp, nkv, d] (local heads) -> [b, S/cp, nq, d].

        Tokens lie as `plan.source_index(cp rank)` says. `window`: a token sees itself and the window-1 before it.
        """
        if (plan.ulysses, plan.ring, plan.method) != (self.ulysses.size, self.ring.size, self.method):
            raise ValueError(f"plan is for {plan.method} {plan.ulysses}x{plan.ring}, not this module's axes")
        if q.shape[:2] != (plan.batch, plan.local_length):
            raise ValueError(f"q is {tuple(q.shape[:2])}, the plan says {(plan.batch, plan.local_length)}")
        if k.shape != v.shape or k.shape[:2] != q.shape[:2] or q.shape[2] % k.shape[2]:
            raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not belong together")
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        scale = q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        setup = RingSetup(self.ring, plan, self._kernel(q.device, q.dtype, q.shape[-1]), scale, window, self.traffic)
        q, k, v = to_heads(q, k, v, self.ulysses, self.traffic)
        return to_sequence(attend(q, k, v, setup), self.ulysses, self.traffic)


def _whole_plan(q: Tensor, axis: Axis, method: str, load_balance: str) -> SequencePlan:
    b, local = q.shape[:2]
    plan = SequencePlan.build(((local * axis.size,),) * b, axis.size, method, load_balance=load_balance)
    if plan.local_length != local:
        raise ValueError(f"{local} tokens a rank cannot be cut {load_balance}: pad S to a multiple of {2 * axis.size}")
    return plan


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | Axis | None = None,
    *,
    plan: SequencePlan | None = None,
    load_balance: str = "zigzag",
    window: int | None = None,
) -> Tensor:
    """Causal ring attention over tokens in zigzag order: rank r holds parts r and 2*cp-1-r of 2*cp equal parts.

    q [b, S/cp, nq, d], k, v [b, S/cp, nkv, d] -> [b, S/cp, nq, d]; differentiable, scores times 1/sqrt(d), no dropout.
    `load_balance="contiguous"`: rank r holds part r of cp. A plan brings its own order (`plan.source_index(rank)`),
    padding and packed documents, and may be built for `all_gather`. group: None = the default group.

    Raises:
        ValueError: S is not a multiple of 2*cp and no plan is given.
    """
    axis = Axis.of(group)
    plan = plan or _whole_plan(q, axis, "p2p", load_balance)
    return ContextParallelAttention(axis, plan.method)(q, k, v, plan, window)


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | Axis | None = None,
    *,
    plan: SequencePlan | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal Ulysses attention over tokens in their own order: rank r holds part r of cp equal parts.

    q [b, S/cp, nq, d], k, v [b, S/cp, nkv, d] -> [b, S/cp, nq, d]; differentiable, scores times 1/sqrt(d), no dropout.
    nq must divide by cp; nkv must divide by cp or divide it.
    """
    axis = Axis.of(group)
    plan = plan or _whole_plan(q, axis, "a2a", "contiguous")
    return ContextParallelAttention(axis, "a2a")(q, k, v, plan, window)
