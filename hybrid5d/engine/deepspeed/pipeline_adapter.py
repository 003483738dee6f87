"""DeepSpeed's pipeline engine under our programs: ZeRO 0/1, any pp, every schedule of plan/pipeline.py.

It keeps DeepSpeed's instruction mechanism and ZeRO optimizer, and replaces what each instruction does: how tensors
travel between stages, where gradients accumulate, which are summed before the reduction. docs/deepspeed.md says what
forces each override; comments cite its headings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule as ds
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from hybrid5d.engine.deepspeed.gradient_buffers import FlatGradients, OptimizerGradients
from hybrid5d.engine.deepspeed.nonfinite import END, Inspected
from hybrid5d.engine.deepspeed.optimizer_state import loss_scale
from hybrid5d.engine.deepspeed.program import NAMES, InputGradient, Key, Program, WeightGradient
from hybrid5d.engine.recorder import Recorder
from hybrid5d.generation.stage import as_they_are
from hybrid5d.models.batch import LocalBatch
from hybrid5d.parallel.collectives import all_reduce
from hybrid5d.parallel.context import Axis, ParallelContext
from hybrid5d.parallel.messages import Inbox, Pending, send
from hybrid5d.plan.pipeline import Instruction, Message, Op, Schedule, arrivals, needs, sends
from hybrid5d.tensor_parallel import WeightGradients, defer_partial_sums, sum_partial_gradients


@lru_cache(maxsize=64)
def _work(
    pipeline: Schedule, rank: int, micro_batches: int, train: bool
) -> tuple[tuple[Instruction, ...], Mapping[int, Sequence[Message]]]:
    """A rank's program and what comes to it, by sender; steps of one size share them."""
    make = pipeline.program if train else pipeline.forwards
    programs = [make(r, micro_batches) for r in range(pipeline.pp)]
    return programs[rank], arrivals(pipeline, rank, programs)


class PipelineAdapter(Inspected, PipelineEngine):
    """PipelineEngine whose messages are one hidden tensor of known shape, sent without blocking.

    Every rank knows each micro-batch's shape and every other rank's program, so a message is received into a fresh
    tensor in the order in which it is sent: no shape messages, no shared receive buffer
    (deepspeed.md: One buffer for what is received), and no order of instructions can deadlock.
    """

    def __init__(self, ctx: ParallelContext, dtype: torch.dtype, pipeline: Schedule, **kwargs: Any):
        self.ctx, self.hidden_dtype, self.pipeline = ctx, dtype, pipeline
        self.batches: Sequence[LocalBatch] = ()
        self.scales: Sequence[float] = ()
        super().__init__(**kwargs)
        defer_partial_sums(self.module.parameters())  # once a step: see _exec_reduce_tied_grads
        bucket = self._config.zero_config.reduce_bucket_size
        own = FlatGradients.fit(self.optimizer)
        self.gradients = FlatGradients(self.optimizer, ctx.dp_cp, bucket) if own else OptimizerGradients(self.optimizer)
        self.weight_gradients = WeightGradients(self.gradients.place)
        self.weight_gradients.attach(p for p in self.module.parameters() if p.requires_grad)
        self._sends: list[Pending[None]] = []
        self._inboxes: dict[int, Inbox] = {}
        self._own: dict[Message, Tensor] = {}  # from one chunk of this rank to another
        self._inputs: dict[Key, Tensor] = {}
        self._outputs: dict[Key, Tensor] = {}
        self._grads: dict[Key, Tensor] = {}
        self._waiting: dict[Key, Any] = {}
        self._results: dict[int, Any] = {}

    gather = staticmethod(as_they_are)
    products = True

    @property
    def divisor(self) -> int:
        """What gradients are divided by after they were added up."""
        return self.ctx.dp_cp.size if self.gradients.divides else 1

    # --- one step ---------------------------------------------------------------------------------------------------

    def train_step(self, batches: Sequence[LocalBatch], scales: Sequence[float]) -> Tensor:
        """Forward, backward, reduce, clip, update. Returns this rank's sum of scaled losses (0 off the last stage)."""
        self.module.train()
        self.micro_batches = len(batches)  # the scales allow for any number (deepspeed.md: Micro-batches)
        self.total_loss = torch.zeros((), dtype=torch.float32, device=self.device)
        self.gradients.start()
        self._execute(batches, scales)
        return self.total_loss

    @contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """Inside, every instruction is timed."""
        plain = type(self)._INSTRUCTION_MAP
        self._INSTRUCTION_MAP = {kind: recorder.timed(NAMES.get(kind, "?"), run) for kind, run in plain.items()}
        try:
            yield
        finally:
            del self._INSTRUCTION_MAP

    def infer(self, batches: Sequence[LocalBatch]) -> list[Any]:
        """Head outputs of each micro-batch on the rank of the last stage, [] elsewhere; no gradients."""
        self.module.eval()
        with torch.no_grad():
            self._execute(batches, ())
        return [self._results.pop(m) for m in sorted(self._results)]

    def _execute(self, batches: Sequence[LocalBatch], scales: Sequence[float]) -> None:
        self.batches, self.scales = batches, scales
        me = self.ctx.pp.rank
        program, expected = _work(self.pipeline, me, len(batches), bool(scales))
        for peer, coming in expected.items():
            shapes = [(message, batches[message[2]].hidden_shape) for message in coming]
            axis = self.ctx.pp if peer < me else self.ctx.pp_back
            self._inboxes[peer] = Inbox(axis, peer, shapes, self.hidden_dtype, self.device)
        try:
            self._exec_schedule(Program(self.pipeline, me, program, bool(scales)))
            for pending in self._sends:
                pending.wait()
        finally:
            self.batches, self.scales = (), ()
            for left in (self._sends, self._inboxes, self._own, self._inputs, self._outputs, self._grads):
                left.clear()
            self._waiting.clear()

    def _is_last(self, key: Key) -> bool:
        return self.pipeline.stage(self.ctx.pp.rank, key[0]) == self.pipeline.stages - 1

    # --- messages ---------------------------------------------------------------------------------------------------

    def _send(self, op: Op, key: Key, x: Tensor) -> None:
        me = self.ctx.pp.rank
        post = sends(self.pipeline, me, Instruction(op, key[1], key[0]))
        assert post is not None
        to, message = post
        if to == me:
            self._own[message] = x
            return
        # Not waited for (deepspeed.md: Blocking sends); tensors of the sends that are over are freed here.
        self._sends = [pending for pending in self._sends if not pending.is_completed()]
        self._sends.append(send(self.ctx.pp if to > me else self.ctx.pp_back, to, x))

    def _receive(self, op: Op, key: Key) -> Tensor:
        message = needs(self.pipeline, self.ctx.pp.rank, Instruction(op, key[1], key[0]))
        assert message is not None
        source = self.pipeline.place(message[1])[0]
        return self._own.pop(message) if source == self.ctx.pp.rank else self._inboxes[source].take(message)

    def _exec_recv_activations(self, buffer_id: Key) -> None:
        self._inputs[buffer_id] = self._receive("F", buffer_id).requires_grad_(bool(self.scales))

    def _exec_send_activations(self, buffer_id: Key) -> None:
        self._send("F", buffer_id, self._outputs[buffer_id].detach())
        if not self.scales:
            del self._outputs[buffer_id]

    def _exec_recv_grads(self, buffer_id: Key) -> None:
        self._grads[buffer_id] = self._receive("B", buffer_id)

    def _exec_send_grads(self, buffer_id: Key) -> None:
        x = self._inputs.pop(buffer_id)
        self._send("B", buffer_id, torch.zeros_like(x) if x.grad is None else x.grad)

    # --- passes -----------------------------------------------------------------------------------------------------

    def _upstream(self, micro: int) -> float:
        """What a micro-batch's loss is multiplied by in backward."""
        return self.scales[micro] * loss_scale(self.optimizer)

    def _exec_forward_pass(self, buffer_id: Key) -> None:
        chunk, micro = buffer_id
        batch, last = self.batches[micro], self._is_last(buffer_id)
        if last and self.scales:
            batch.upstream = self._upstream(micro)
        if self.inspector is not None:
            self.inspector.begin(micro, batch)
        x = self._inputs.get(buffer_id) if self.scales else self._inputs.pop(buffer_id, None)
        output = self.module(x, batch, chunk)
        if not last or self.scales:
            self._outputs[buffer_id] = output
        else:
            self._results[micro] = output
        if last and self.inspector is not None:
            self.inspector.check(output, "loss", END)
        if last and self.scales:
            self.total_loss = self.total_loss + output.detach().float() * self.scales[micro]

    def _exec_backward_pass(self, buffer_id: Key) -> None:
        output, grad = self._outputs.pop(buffer_id), self._grads.pop(buffer_id, None)
        if not output.requires_grad:
            return  # all parameters so far are frozen (deepspeed.md: Stages without a gradient)
        if self._is_last(buffer_id):
            grad = torch.full_like(output, self._upstream(buffer_id[1]))
        if self.inspector is not None:
            self.inspector.micro = buffer_id[1]
        self.gradients.before_backward()
        torch.autograd.backward(output, grad)
        self.gradients.after_backward()
        self._inspect_gradients()

    def _exec_input_gradient(self, buffer_id: Key) -> None:
        with self.weight_gradients.put_off() as waiting:
            self._exec_backward_pass(buffer_id)
        self._waiting[buffer_id] = waiting

    def _exec_weight_gradient(self, buffer_id: Key) -> None:
        self.weight_gradients.run(self._waiting.pop(buffer_id))
        self.gradients.after_backward(products_only=True)
        if self.inspector is not None:
            self.inspector.micro = buffer_id[1]
        self._inspect_gradients()

    def _inspect_gradients(self) -> None:
        if self.inspector is not None:
            self.inspector.check_gradients(self.gradients.gradient)

    # --- reduction --------------------------------------------------------------------------------------------------

    def _exec_reduce_tied_grads(self) -> None:
        # The last instruction before the reduction. DeepSpeed has no sum for partial gradients, and looks for tied ones
        # in `.grad` also where they are elsewhere (deepspeed.md: Sums over tp) (deepspeed.md: Where the gradient is).
        self.gradients.settle()
        sum_partial_gradients(self.module.parameters(), self.gradients.gradient)
        for weight, group in self.module.get_tied_weights_and_groups():
            grad = self.gradients.gradient(weight)
            if grad is not None:
                grad.copy_(all_reduce(grad.clone(), Axis.from_group(group)).wait())

    def _exec_reduce_grads(self) -> None:
        if isinstance(self.gradients, FlatGradients):
            self.gradients.reduce()
        else:
            super()._exec_reduce_grads()

    _INSTRUCTION_MAP = {  # noqa: RUF012  DeepSpeed looks instructions up here, not by attribute
        **PipelineEngine._INSTRUCTION_MAP,
        ds.ForwardPass: _exec_forward_pass,
        ds.BackwardPass: _exec_backward_pass,
        InputGradient: _exec_input_gradient,
        WeightGradient: _exec_weight_gradient,
        ds.SendActivation: _exec_send_activations,
        ds.RecvActivation: _exec_recv_activations,
        ds.SendGrad: _exec_send_grads,
        ds.RecvGrad: _exec_recv_grads,
        ds.ReduceTiedGrads: _exec_reduce_tied_grads,
        ds.ReduceGrads: _exec_reduce_grads,
    }
