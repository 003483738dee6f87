"""Attention over K/V blocks that other ranks hold: one loop, driven by the steps of a `SequencePlan`.

Shapes here are ring-local: q [b, S/ring, nq, d], k, v [b, S/ring, nkv, d]. Partial results are merged in fp32 by a
max-shifted log-sum-exp; the backward recomputes only each block's probabilities, from the saved (out, lse).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybrid5d.context_parallel.kernels import Call, Kernel
from hybrid5d.context_parallel.merge import Merge
from hybrid5d.context_parallel.transport import GatherTransport, Part, RingTransport, Transport, accumulate_dtype
from hybrid5d.parallel.context import Axis
from hybrid5d.parallel.copies import to_device
from hybrid5d.parallel.messages import Traffic
from hybrid5d.plan.sequence import SequencePlan


@dataclass(frozen=True)
class RingSetup:
    """Everything but tensors that one attention call needs."""

    axis: Axis
    plan: SequencePlan
    kernel: Kernel
    scale: float
    window: int | None = None
    traffic: Traffic | None = None

    def calls(self, i: int, device: torch.device) -> Sequence[Call]:
        """The kernel calls of this rank's step i."""
        program = Program(self.plan, self.axis.rank, self.kernel, self.window)
        if program.key(device) not in self.plan.cache:  # nobody prepared it
            program.place(iter(to_device(program.tensors, device)), device)
        return self.plan.cache[program.key(device)][i]

    def transport(self) -> Transport:
        """A fresh one for one pass."""
        if self.plan.ring == 1:
            kind: type[Transport] = Transport
        else:
            kind = GatherTransport if self.plan.method == "all_gather" else RingTransport
        return kind(self.axis, self.plan, self.window, self.traffic)


@dataclass(frozen=True)
class Program:
    """A rank's kernel calls of all steps; what they need on the device may go there with other tensors, in one copy."""

    plan: SequencePlan
    rank: int  # on the ring
    kernel: Kernel
    window: int | None

    def key(self, device: torch.device | None = None) -> tuple[object, ...]:
        """Of the plan's cache; without a device, of the calls as they are made on the host."""
        return "calls", self.kernel.name, self.rank, self.window, device

    @property
    def calls(self) -> list[Sequence[Call]]:
        """By step, on the host."""
        if self.key() not in self.plan.cache:
            steps = self.plan.steps(self.rank, self.window, not self.kernel.native_window)
            self.plan.cache[self.key()] = [self.kernel.calls(step.blocks, self.plan.batch) for step in steps]
        return self.plan.cache[self.key()]

    @property
    def tensors(self) -> list[Tensor]:
        return [x for calls in self.calls for call in calls for x in call.tensors]

    def place(self, there: Iterator[Tensor], device: torch.device) -> None:
        """Take `tensors` on the device, in order; attention finds them in the plan."""
        self.plan.cache[self.key(device)] = [[call.placed(there) for call in calls] for calls in self.calls]


def attend(q: Tensor, k: Tensor, v: Tensor, setup: RingSetup) -> Tensor:
    """q [b, S/ring, nq, d], k, v [b, S/ring, nkv, d] -> [b, S/ring, nq, d]; differentiable.

    Forward moves K/V (as kv heads) over the ring axis; backward moves them again, and dK/dV in fp32.
    """
    return _RingAttention.apply(q, k, v, setup)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, setup: RingSetup) -> Tensor:
        merge, transport = Merge(q), setup.transport()
        transport.start(k, v)
        for i in range(transport.hops + 1):
            keys, values = transport.fetch(i)
            for call in setup.calls(i, q.device):
                part = q[:, call.rows], keys[:, call.keys], values[:, call.keys]
                merge.add(call, *setup.kernel.forward(*part, call, setup.scale))
        out, lse = merge.result()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.setup = setup
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        setup: RingSetup = ctx.setup
        dout = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        transport = setup.transport()
        transport.start(k, v)
        dq: Tensor | None = None
        home: list[Part] = []
        for i in range(transport.hops + 1):
            keys, values = transport.fetch(i)
            parts: list[Part] = []
            for call in setup.calls(i, q.device):
                part = q[:, call.rows], keys[:, call.keys], values[:, call.keys]
                given = out[:, call.rows], lse[:, :, call.rows]
                dq_part, dk, dv = setup.kernel.backward(dout[:, call.rows], *part, *given, call, setup.scale)
                dq = _add_rows(dq, call, dq_part, q)
                parts.append((call.keys, dk, dv))
            if i == 0:
                home = parts
            else:
                transport.send_grad(i, parts)
        dk, dv = transport.collect(home)
        return (torch.zeros_like(q) if dq is None else dq.to(q.dtype)), dk.to(k.dtype), dv.to(v.dtype), None


def _add_rows(dq: Tensor | None, call: Call, part: Tensor, q: Tensor) -> Tensor:
    if dq is None:
        if part.shape == q.shape:
            return part.to(accumulate_dtype(q.dtype))
        dq = torch.zeros_like(q, dtype=accumulate_dtype(q.dtype))
    dq[:, call.rows] += part  # the rows of one call are distinct
    return dq
