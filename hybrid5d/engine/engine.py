"""The engine: a validated plan becomes a running model; one call is one optimizer step.

Everything here speaks the user's terms (rows, tokens, global batch); DeepSpeed's live in the adapter.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybrid5d.checkpoint.export import export_hf
from hybrid5d.checkpoint.save_load import load_checkpoint, save_checkpoint
from hybrid5d.checkpoint.state import TrainState
from hybrid5d.context_parallel import choose_kernel
from hybrid5d.data.types import IGNORE_INDEX, Document, MicroBatch, StepBatch
from hybrid5d.engine.collate import (
    SequenceOptions,
    fault_of,
    local_batch,
    real_tokens,
    rows_of,
    sequence_plan,
    valid_tokens,
)
from hybrid5d.engine.deepspeed.adapter import PipelineAdapter, PlainAdapter, build_adapter
from hybrid5d.engine.deepspeed.optimizer_state import OptimizerState
from hybrid5d.engine.deepspeed.parameters import parameter_groups
from hybrid5d.engine.deepspeed.pipeline_module import HybridPipelineModule
from hybrid5d.errors import DataError
from hybrid5d.models.batch import LocalBatch
from hybrid5d.models.dtypes import DTYPES
from hybrid5d.parallel.collectives import all_gather_seq
from hybrid5d.parallel.context import ParallelContext
from hybrid5d.plan.run import RunPlan


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; the same on every rank.

    Attributes:
        step: optimizer steps done, this one included.
        loss: mean over the global batch's valid tokens (0 where there are none).
        grad_norm: global L2 norm before clipping.
        lr: learning rate this step used.
        valid_tokens, tokens: tokens with a label; tokens of real rows. Counted once, whatever the layout.
        step_time_s: seconds, slowest rank.
        peak_memory_bytes: largest peak over ranks (device memory on CUDA, resident set on CPU).
        rows_seen: sample ids of the global batch.
        skipped: fp16 overflow; the weights did not change.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    valid_tokens: int
    tokens: int
    step_time_s: float
    peak_memory_bytes: int
    rows_seen: tuple[int, ...]
    skipped: bool = False


@dataclass(frozen=True)
class TokenLogprobs:
    """Per-token results of one document, natural order.

    logprobs[i] is the log-probability of labels[i] after reading input_ids[i] (0 where there is no label), entropy[i]
    that of the whole next-token distribution. fp32 numpy [n] each.
    """

    logprobs: np.ndarray
    entropy: np.ndarray


class Engine:
    """A model in training on this rank. Build it with `hybrid5d.engine.build.initialize`.

    Attributes:
        plan: what was asked for; ctx: this rank's axes; module: this rank's layers (parameters carry `.shard`);
        ds: the DeepSpeed engine; global_step: optimizer steps done.
    """

    def __init__(
        self,
        plan: RunPlan,
        ctx: ParallelContext,
        module: HybridPipelineModule,
        options: SequenceOptions,
    ):
        self.plan, self.ctx, self.module, self.sequence_options = plan, ctx, module, options
        self.global_step = 0
        self.hidden_size = plan.model.hidden_size if plan.model else 0
        self.device = current_device()
        groups = parameter_groups(module)
        self.dtype = DTYPES[plan.precision.dtype]
        self.ds: PipelineAdapter | PlainAdapter = build_adapter(
            module, ctx, plan.deepspeed, groups, plan.zero_stage, self.dtype
        )
        self._agreed = False
        self._warned_no_targets = False

    # --- training ---------------------------------------------------------------------------------------------------

    def train_batch(self, batch: StepBatch) -> StepResult:
        """One optimizer step over the global batch of which `batch` holds this dp rank's rows.

        Loss, gradients and norm are those of the mean over all valid tokens of the global batch, whatever the layout.
        Collective over the world.

        Raises:
            DataError: on every rank, for a row with tokens beyond the vocabulary; at the first step, when ranks of one
                dp replica were given different rows.
        """
        started = time.perf_counter()
        if not self._agreed:
            self._check_agreement(batch)
        counts = self._counts(batch.micro_batches)
        lr = self._set_schedule()
        scales = self._loss_scales(batch.micro_batches, counts[0])
        total = self.ds.train_step(self._local(batch.micro_batches), scales)
        loss = self._global_sum(total) / self._divisor
        self.global_step += 1
        norm = self.ds.get_global_grad_norm()
        elapsed, peak = self._max_over_world([time.perf_counter() - started, float(peak_memory_bytes(self.device))])
        return StepResult(
            step=self.global_step,
            loss=loss,
            grad_norm=float(norm) if norm is not None else float("nan"),
            lr=lr,
            valid_tokens=counts[0],
            tokens=counts[1],
            step_time_s=elapsed,
            peak_memory_bytes=int(peak),
            rows_seen=batch.row_ids,
            skipped=bool(getattr(self.ds.optimizer, "overflow", False)),
        )

    @property
    def attention_kernel(self) -> str:
        """Name of the attention kernel in use (`actor.model.attention_kernel` forces one)."""
        head_dim = self.plan.model.head_dim if self.plan.model else 64
        return choose_kernel(self.plan.config.actor.model.attention_kernel, self.device, self.dtype, head_dim).name

    @property
    def _divisor(self) -> int:
        """What DeepSpeed divides by: accumulation steps of its config, and the mean over dp x cp."""
        return self.ds.gradient_accumulation_steps() * self.ctx.dp_cp.size

    def _loss_scales(self, micro_batches: Sequence[MicroBatch], valid: int) -> list[float]:
        """Factor on each micro-batch's loss sum that DeepSpeed's divisions turn into the wanted mean."""
        if self.plan.config.actor.loss_normalization == "micro_batch":
            means = len(micro_batches) * self.ctx.dp.size
            return [self._divisor / (means * max(valid_tokens(mb), 1)) for mb in micro_batches]
        if valid == 0 and not self._warned_no_targets and self.ctx.rank == 0:
            self._warned_no_targets = True
            print(f"warning: step {self.global_step + 1}: no row of the batch has a label; loss and gradients are 0")
        return [self._divisor / max(valid, 1)] * len(micro_batches)

    def _set_schedule(self) -> float:
        lr, decay = self.plan.schedule.lr(self.global_step), self.plan.schedule.weight_decay(self.global_step)
        for group in self.ds.optimizer.param_groups:
            group["lr"] = lr
            if group.get("name") == "decay":
                group["weight_decay"] = decay
        return lr

    def _local(self, micro_batches: Sequence[MicroBatch]) -> list[LocalBatch]:
        return [local_batch(mb, self.ctx, self.sequence_options, self.hidden_size, self.device) for mb in micro_batches]

    # --- evaluation -------------------------------------------------------------------------------------------------

    def eval_batch(self, batch: StepBatch) -> tuple[float, int]:
        """Sum of the cross entropy and number of valid tokens over the rows of all dp ranks; nothing is changed.

        Every dp rank passes the same number of micro-batches. Collective over the world.
        """
        valid, _ = self._counts(batch.micro_batches)
        outputs = self.ds.infer(self._local(batch.micro_batches))
        total = torch.stack([o.float() for o in outputs]).sum() if outputs else torch.zeros((), device=self.device)
        return self._global_sum(total), valid

    def compute_logprobs(
        self, documents: Sequence[Document], micro_batch_size: int | None = None
    ) -> list[TokenLogprobs]:
        """Log-probability of each label and entropy of each distribution, per token, for documents in their own order.

        Every rank passes the same documents and gets all results. Rows are spread over dp; the vocabulary stays sharded
        over tp; the sequence is put back together over cp; the last stage's values go to every stage.
        """
        size = micro_batch_size or self.plan.batch.micro_batch_size
        micro_batches = self._dealt(documents, size)
        self._counts(micro_batches)
        outputs = self.ds.infer([replace(batch, head="logprobs") for batch in self._local(micro_batches)])
        flat = np.zeros((2, sum(len(d) for d in documents)), dtype=np.float32)
        starts = np.cumsum([0, *(len(d) for d in documents)])
        for mb, output in zip(micro_batches, outputs):
            self._place(mb, output, flat, starts)
        summed = self._sum_results(flat)
        return [TokenLogprobs(summed[0, a:b], summed[1, a:b]) for a, b in pairwise(starts)]

    def _dealt(self, documents: Sequence[Document], size: int) -> list[MicroBatch]:
        """This dp rank's micro-batches; short ranks get dummies (row_id -1) so that all run the same number."""
        numbered = [replace(d, row_id=i) for i, d in enumerate(documents)]
        per_rank = -(-len(numbered) // (self.ctx.dp.size * size)) * size
        mine = numbered[self.ctx.dp.rank * per_rank : (self.ctx.dp.rank + 1) * per_rank]
        dummy = Document(np.zeros(1, np.int64), np.full(1, IGNORE_INDEX, np.int64), -1)
        mine += [dummy] * (per_rank - len(mine))
        return [tuple((d,) for d in mine[i : i + size]) for i in range(0, per_rank, size)]

    def _place(
        self, micro_batch: MicroBatch, output: tuple[Tensor, Tensor], flat: np.ndarray, starts: np.ndarray
    ) -> None:
        """Gather a micro-batch's [b, S/cp] results over cp and write them where the documents' tokens stand."""
        whole = all_gather_seq(torch.stack(output, -1), self.ctx.cp).wait().cpu().numpy()
        plan = sequence_plan(micro_batch, self.ctx, self.sequence_options)
        index = np.concatenate([plan.source_index(r) for r in range(self.ctx.cp.size)], axis=1)
        if self.ctx.tp.rank or self.ctx.cp.rank:
            return  # these ranks hold equal values; one of them contributes
        for r, row in enumerate(rows_of(micro_batch, self.sequence_options)):
            values = np.zeros((sum(len(d) for d in row), 2), dtype=np.float32)
            real = index[r] >= 0
            values[index[r][real]] = whole[r][real]
            at = 0
            for document in row:
                if document.row_id >= 0:
                    begin = starts[document.row_id]
                    flat[:, begin : begin + len(document)] = values[at : at + len(document)].T
                at += len(document)

    def _sum_results(self, flat: np.ndarray) -> np.ndarray:
        """Each token was written by one rank of the world; the sum hands every rank all of them."""
        x = torch.from_numpy(flat).to(self.device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(x)
        return x.cpu().numpy()

    # --- numbers that all ranks share -------------------------------------------------------------------------------

    def _counts(self, micro_batches: Sequence[MicroBatch]) -> tuple[int, int]:
        """(tokens with a label, tokens of real rows) over all dp ranks. Raises DataError on all for a bad row."""
        fault = fault_of(micro_batches, self.plan.model.vocab_size) if self.plan.model else None
        sums = [sum(map(valid_tokens, micro_batches)), sum(map(real_tokens, micro_batches)), int(fault is not None)]
        valid, tokens, faults = self._sum_over_dp(sums)
        if faults:
            raise DataError(f"data: {fault or 'a row of another dp rank does not fit the model'}")
        return valid, tokens

    def _sum_over_dp(self, values: list[int]) -> list[int]:
        if self.ctx.dp.size == 1:
            return values
        x = torch.tensor(values, dtype=torch.int64, device=self.device)
        dist.all_reduce(x, group=self.ctx.dp.group)
        return [int(v) for v in x.tolist()]

    def _global_sum(self, local: Tensor) -> float:
        """Sum over dp x cp of the last stage's value, known to every rank; tp ranks hold equal values."""
        x = local.detach().double().clone()
        for axis in (self.ctx.dp_cp, self.ctx.pp):  # other stages contribute zero
            if axis.size > 1:
                dist.all_reduce(x, group=axis.group)
        return float(x)

    def _max_over_world(self, values: list[float]) -> list[float]:
        if self.ctx.layout.world_size == 1:
            return values
        x = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        return [float(v) for v in x.tolist()]

    def _check_agreement(self, batch: StepBatch) -> None:
        """Ranks of one dp replica must hold the same rows; found out before anything trains on a mixture."""
        self._agreed = True
        world = self.ctx.layout.world_size
        if world == 1:
            return
        mine = torch.tensor([_checksum(batch), len(batch.micro_batches)], dtype=torch.int64, device=self.device)
        everyone = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(everyone, mine)
        layout = self.ctx.layout
        by_dp: dict[int, dict[int, list[int]]] = {}
        for rank, value in enumerate(everyone):
            by_dp.setdefault(layout.coordinate(rank).dp, {}).setdefault(int(value[0]), []).append(rank)
        for dp_rank, found in by_dp.items():
            if len(found) > 1:
                sets = " and ".join(str(ranks) for ranks in found.values())
                raise DataError(f"data: ranks {sets} belong to dp rank {dp_rank} but were given different rows")
        if len({int(v[1]) for v in everyone}) > 1:
            raise DataError(
                f"data: dp ranks were given different numbers of micro-batches: {[int(v[1]) for v in everyone]}"
            )

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> TrainState:
        """What checkpoints are made of, as it is now."""
        access = OptimizerState(self.ds.optimizer, self.ctx.dp_cp)
        return TrainState(self.module, access, self.ctx, self.plan, self.global_step)

    def save_checkpoint(self, directory: str | Path, state: Mapping[str, Any] | None = None) -> Path:
        """Write `directory/global_step_N`, which any layout can load, and `directory/latest`; atomic.

        `state` (JSON-ready: data position ...) is handed back by `load_checkpoint`. Collective over the world.
        """
        return save_checkpoint(self.state, directory, state)

    def load_checkpoint(self, directory: str | Path) -> dict[str, Any]:
        """Restore weights, optimizer state and step from `save_checkpoint`'s output; returns its `state`.

        `directory`: a folder of checkpoints (its newest is taken) or one checkpoint. Collective over the world.
        """
        manifest = load_checkpoint(self.state, directory)
        self.global_step = self.ds.global_steps = manifest.step
        return dict(manifest.state)

    def export_hf(
        self, directory: str | Path, dtype: str = "same", max_shard_size: str = "5GB", force: bool = False
    ) -> Path:
        """Write a Hugging Face folder (config.json, safetensors, tokenizer files). Collective over the world.

        `dtype`: fp32, bf16, fp16 or same (the run's precision); an existing folder is replaced only with `force`.
        """
        return export_hf(self.state, directory, dtype, max_shard_size, force)


def _checksum(batch: StepBatch) -> int:
    import zlib

    value = 0
    for mb in batch.micro_batches:
        for row in mb:
            for d in row:
                value = zlib.crc32(np.ascontiguousarray(d.input_ids).tobytes(), value)
                value = zlib.crc32(np.ascontiguousarray(d.labels).tobytes(), value)
    return value


def current_device() -> torch.device:
    """The CUDA device of this rank, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def peak_memory_bytes(device: torch.device) -> int:
    """Peak of device memory on CUDA, of the resident set on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
