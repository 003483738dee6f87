"""The seam to DeepSpeed: two engines that run one optimizer step over given micro-batches.

`PipelineAdapter` (ZeRO 0/1, any pp) keeps DeepSpeed's 1F1B schedule, ZeRO optimizer and reduction, and replaces how
tensors travel between stages and which gradients are summed before the reduction. `PlainAdapter` (ZeRO 2/3, pp 1)
is the plain engine. docs/deepspeed.md says what forces each override; comments cite its headings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import GatheredParameters
from torch import Tensor, nn

from hybrid5d.engine.deepspeed.pipeline_module import HybridPipelineModule
from hybrid5d.generation.stage import Gather, as_they_are
from hybrid5d.models.batch import LocalBatch
from hybrid5d.parallel.collectives import all_reduce
from hybrid5d.parallel.context import Axis, ParallelContext
from hybrid5d.parallel.messages import Pending, exchange
from hybrid5d.tensor_parallel import defer_partial_sums, sum_partial_gradients


class PipelineAdapter(PipelineEngine):
    """PipelineEngine whose messages are one hidden tensor of known shape, sent without blocking.

    Every rank knows each micro-batch's shape, so receivers allocate a fresh buffer of the right size: no shape
    messages, and no shared receive buffer (deepspeed.md: One buffer for what is received).
    """

    def __init__(self, ctx: ParallelContext, dtype: torch.dtype, **kwargs: Any):
        self.ctx, self.hidden_dtype = ctx, dtype
        self.batches: Sequence[LocalBatch] = ()
        self.scales: Sequence[float] = ()
        self._sends: list[Pending[None]] = []
        self._received = self._forwarded = 0
        super().__init__(**kwargs)
        defer_partial_sums(self.module.parameters())  # once a step: see _exec_reduce_tied_grads
        self._results: list[Any] = []

    gather = staticmethod(as_they_are)

    # --- one step ---------------------------------------------------------------------------------------------------

    def train_step(self, batches: Sequence[LocalBatch], scales: Sequence[float]) -> Tensor:
        """Forward, backward, reduce, clip, update. Returns this rank's sum of scaled losses (0 off the last stage)."""
        self.module.train()
        self._start(batches, scales)
        self.micro_batches = len(batches)  # the scales allow for any number (deepspeed.md: Micro-batches)
        self.total_loss = None
        self._compute_loss = True
        self._exec_schedule(
            schedule.TrainSchedule(micro_batches=len(batches), stages=self.num_stages, stage_id=self.stage_id)
        )
        self._drain()
        return torch.zeros((), dtype=torch.float32, device=self.device) if self.total_loss is None else self.total_loss

    def infer(self, batches: Sequence[LocalBatch]) -> list[Any]:
        """Head outputs of each micro-batch on the last stage, [] elsewhere; no gradients."""
        self.module.eval()
        self._start(batches, ())
        self._results = []
        with torch.no_grad():
            self._exec_schedule(
                schedule.InferenceSchedule(micro_batches=len(batches), stages=self.num_stages, stage_id=self.stage_id)
            )
        self._drain()
        return self._results

    def _start(self, batches: Sequence[LocalBatch], scales: Sequence[float]) -> None:
        self.batches, self.scales = batches, scales
        self._received = self._forwarded = 0

    def _drain(self) -> None:
        for send in self._sends:
            send.wait()
        self._sends.clear()
        self.batches, self.scales = (), ()
        for slots in self.pipe_buffers.values():
            slots[:] = [None] * len(slots)

    # --- instructions -----------------------------------------------------------------------------------------------

    def _exec_load_micro_batch(self, buffer_id: int) -> None:
        """Nothing to load: each rank built its micro-batches before the step."""

    def _exec_forward_pass(self, buffer_id: int) -> None:
        batch, scale = self.batches[self._forwarded], self.scales[self._forwarded] if self.scales else None
        self._forwarded += 1
        if scale is not None:
            batch.upstream = _upstream(self, scale)
        x = None if self.is_first_stage() else self.pipe_buffers["inputs"][buffer_id]
        outputs = DeepSpeedEngine.forward(self, x, batch)
        if not self.is_last_stage():
            self.pipe_buffers["outputs"][buffer_id] = outputs
        elif scale is None:
            self._results.append(outputs)
        else:
            self.loss = outputs * scale
            detached = self.loss.detach().float()
            self.total_loss = detached if self.total_loss is None else self.total_loss + detached

    def _exec_backward_pass(self, buffer_id: int) -> None:
        # Nothing to do where all parameters so far are frozen (deepspeed.md: Stages without a gradient).
        if self.is_last_stage():
            if self.loss.requires_grad:
                super()._exec_backward_pass(buffer_id)
            self.loss = self.loss.detach()
        elif self.pipe_buffers["outputs"][buffer_id].requires_grad:
            super()._exec_backward_pass(buffer_id)
        self.pipe_buffers["outputs"][buffer_id] = None

    def _exec_send_activations(self, buffer_id: int) -> None:
        self._send(self.pipe_buffers["outputs"][buffer_id].detach(), self.ctx.pp.rank + 1)

    def _exec_recv_activations(self, buffer_id: int) -> None:
        shape = self.batches[self._received].hidden_shape
        self._received += 1
        x = self._receive(shape, self.ctx.pp.rank - 1)
        self.pipe_buffers["inputs"][buffer_id] = x.requires_grad_(bool(self.scales))

    def _exec_send_grads(self, buffer_id: int) -> None:
        x = self.pipe_buffers["inputs"][buffer_id]
        grad = x.grad if x.grad is not None else torch.zeros_like(x)
        self._send(grad, self.ctx.pp.rank - 1)
        self.pipe_buffers["inputs"][buffer_id] = None

    def _exec_recv_grads(self, buffer_id: int) -> None:
        outputs = self.pipe_buffers["outputs"][buffer_id]
        self.grad_layer = self._receive(outputs.shape, self.ctx.pp.rank + 1)

    def _send(self, x: Tensor, stage: int) -> None:
        # Not waited for (deepspeed.md: Blocking sends); tensors of the sends that are over are freed here.
        self._sends = [send for send in self._sends if not send.is_completed()]
        self._sends.append(exchange(self.ctx.pp, [(stage, x.contiguous())], []))

    def _receive(self, shape: Sequence[int], stage: int) -> Tensor:
        x = torch.empty(tuple(shape), dtype=self.hidden_dtype, device=self.device)
        exchange(self.ctx.pp, [], [(stage, x)]).wait()
        return x

    # --- gradients --------------------------------------------------------------------------------------------------

    def gradient(self, param: nn.Parameter) -> Tensor | None:
        """The gradient that the optimizer will reduce and use (deepspeed.md: Where the gradient is)."""
        if self.using_bf16_optimizer:
            flat = getattr(param, "_hp_grad", None)  # one-dimensional, a view of the buffer of its group
            return None if flat is None else flat.view(param.shape)
        if getattr(self.optimizer, "use_grad_accum_attribute", False):
            return getattr(param, "grad_accum", None)
        return param.grad

    def _exec_reduce_tied_grads(self) -> None:
        # The last instruction before the reduction. DeepSpeed has no sum for partial gradients, and looks for tied ones
        # in `.grad` also where they are elsewhere (deepspeed.md: Sums over tp) (deepspeed.md: Where the gradient is).
        if getattr(self.optimizer, "use_grad_accum_attribute", False):
            self.optimizer.fill_grad_accum_attribute()
        sum_partial_gradients(self.module.parameters(), self.gradient)
        for weight, group in self.module.get_tied_weights_and_groups():
            grad = self.gradient(weight)
            if grad is not None:
                grad.copy_(all_reduce(grad.clone(), Axis.from_group(group)).wait())

    _INSTRUCTION_MAP = {  # noqa: RUF012  DeepSpeed looks instructions up here, not by attribute
        **PipelineEngine._INSTRUCTION_MAP,
        schedule.LoadMicroBatch: _exec_load_micro_batch,
        schedule.ForwardPass: _exec_forward_pass,
        schedule.BackwardPass: _exec_backward_pass,
        schedule.SendActivation: _exec_send_activations,
        schedule.RecvActivation: _exec_recv_activations,
        schedule.SendGrad: _exec_send_grads,
        schedule.RecvGrad: _exec_recv_grads,
        schedule.ReduceTiedGrads: _exec_reduce_tied_grads,
    }


class PlainAdapter(DeepSpeedEngine):
    """The plain engine at pp 1 for ZeRO 2 and 3, which reduce gradients while backward runs.

    Partial gradients are therefore summed over tp in the backward pass itself, as the layers do by default
    (deepspeed.md: Sums over tp).
    """

    def __init__(self, ctx: ParallelContext, **kwargs: Any):
        super().__init__(**kwargs)
        self.ctx = ctx
        if self.zero_optimization_stage() == 3:
            self._count_replicas_once()

    @property
    def gather(self) -> Gather:
        """Makes parameters whole for a while."""
        return GatheredParameters if self.zero_optimization_stage() == 3 else as_they_are

    def _count_replicas_once(self) -> None:
        """Hand ZeRO 3's norm zeros for copies of kv heads (deepspeed.md: What the norm counts)."""
        norm_of = self.optimizer.get_grad_norm_direct

        def count_once(gradients: list[Tensor], params: list[nn.Parameter], *args: Any, **kwargs: Any) -> Tensor:
            kept = [
                torch.zeros_like(g) if getattr(p, "ds_pipe_replicated", False) else g for g, p in zip(gradients, params)
            ]
            return norm_of(kept, params, *args, **kwargs)

        self.optimizer.get_grad_norm_direct = count_once

    def train_step(self, batches: Sequence[LocalBatch], scales: Sequence[float]) -> Tensor:
        self.module.train()
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        for i, (batch, scale) in enumerate(zip(batches, scales, strict=True)):
            self.set_gradient_accumulation_boundary(i == len(batches) - 1)
            batch.upstream = _upstream(self, scale)
            loss = DeepSpeedEngine.forward(self, None, batch) * scale
            total += loss.detach().float()
            self.backward(loss)
            self.step()
        return total

    def infer(self, batches: Sequence[LocalBatch]) -> list[Any]:
        self.module.eval()
        with torch.no_grad():
            return [DeepSpeedEngine.forward(self, None, batch) for batch in batches]


def loss_scale(optimizer: Any) -> float:
    """fp16's factor on the loss as it is now, 1 in other precisions."""
    scaler = getattr(optimizer, "loss_scaler", None)
    return 1.0 if scaler is None else float(scaler.cur_scale)


def dynamic_scale(optimizer: Any) -> bool:
    """Whether it adapts a loss scale: fp16 without `loss_scale`."""
    return bool(getattr(getattr(optimizer, "loss_scaler", None), "dynamic", False))


def _upstream(engine: DeepSpeedEngine, scale: float) -> float:
    """What DeepSpeed calls backward of a micro-batch's loss with, where that is multiplied by `scale` first."""
    return scale * loss_scale(engine.optimizer) / engine.gradient_accumulation_steps()


def build_adapter(
    module: HybridPipelineModule,
    ctx: ParallelContext,
    ds_config: dict[str, Any],
    parameter_groups: list[dict[str, Any]],
    zero_stage: int,
    dtype: torch.dtype,
) -> PipelineAdapter | PlainAdapter:
    """The engine for this ZeRO stage, built directly (deepspeed.md: No subclass through `initialize`)."""
    from deepspeed.runtime.config import DeepSpeedConfig

    mpu = module.mpu()
    assert not hasattr(mpu, "get_sequence_parallel_world_size"), "gradients rescaled (deepspeed.md: Ulysses names)"
    common: dict[str, Any] = {
        "args": None,
        "model": module,
        "model_parameters": parameter_groups,
        "mpu": mpu,  # also at pp 1 (deepspeed.md: mpu at pp 1)
        "config": ds_config,
        "config_class": DeepSpeedConfig(ds_config, mpu),
        "dont_change_device": True,
    }
    engine = PlainAdapter(ctx, **common) if zero_stage >= 2 else PipelineAdapter(ctx, dtype, **common)
    if dynamic_scale(engine.optimizer):
        engine.optimizer.loss_scaler.raise_error_at_min_scale = False  # with a bare Exception; the trainer says it
    return engine
