"""The engine: a validated plan becomes a running model; one call is one optimizer step.

Everything here speaks the user's terms (rows, tokens, global batch); DeepSpeed's live in the adapter.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hybrid5d.checkpoint.export import export_hf
from hybrid5d.checkpoint.hf_tensors import BUCKET_BYTES, HfTensors
from hybrid5d.checkpoint.load import load_checkpoint
from hybrid5d.checkpoint.manifest import critic_beside, find_checkpoint
from hybrid5d.checkpoint.save import Save, Saved, begin_save
from hybrid5d.checkpoint.state import TrainState
from hybrid5d.context_parallel import choose_kernel
from hybrid5d.data.types import Document, MicroBatch, StepBatch
from hybrid5d.engine.collate import SequenceOptions, local_batch, sequence_plan, valid_tokens
from hybrid5d.engine.deepspeed.adapter import PipelineAdapter, PlainAdapter, build_adapter
from hybrid5d.engine.deepspeed.distributed import current_device, transport
from hybrid5d.engine.deepspeed.optimizer_state import OptimizerState, loss_scale
from hybrid5d.engine.deepspeed.parameters import parameter_groups
from hybrid5d.engine.deepspeed.pipeline_module import HybridPipelineModule
from hybrid5d.engine.logprobs import collect, deal
from hybrid5d.engine.objective import SUPERVISED, Objective
from hybrid5d.engine.recorder import Recorder
from hybrid5d.engine.reference import Reference
from hybrid5d.engine.replicas import replica_faults
from hybrid5d.engine.results import BatchResult, StepResult, TokenLogprobs
from hybrid5d.engine.step import (
    Counts,
    check_agreement,
    count_tokens,
    device_memory,
    loss_scales,
    own_modes,
    peak_memory_bytes,
    reported,
    set_schedule,
    start_memory_peak,
    sum_over_model,
)
from hybrid5d.errors import ConfigError, ConfigErrors, DataError
from hybrid5d.generation import Generated, Generator, Request, Sampling, Stage
from hybrid5d.hf.spec import ModelSpec
from hybrid5d.models.batch import LocalBatch
from hybrid5d.models.dtypes import DTYPES
from hybrid5d.parallel.agree import gather_objects, together, world_axis
from hybrid5d.parallel.collectives import max_scalars
from hybrid5d.parallel.context import ParallelContext
from hybrid5d.plan.pipeline_rules import asked_chunks
from hybrid5d.plan.run import RunPlan


class Engine:
    """A model in training on this rank. Build it with `hybrid5d.initialize`.

    Attributes:
        plan: what was asked for.
        ctx: this rank's axes.
        module: this rank's layers; parameters say which part of which tensor they hold.
        device: where they are.
        ds: the DeepSpeed engine, for what has no method here.
        critic: PPO's value model on the same ranks, in a layout of its own; saved and loaded with this engine.
        global_step: steps done: batches trained on.
        skipped_steps: those of them that changed nothing (loss or gradients not finite); the schedules of learning
            rate and weight decay do not count them.
    """

    def __init__(
        self, plan: RunPlan, spec: ModelSpec, ctx: ParallelContext, module: HybridPipelineModule,
        options: SequenceOptions,
    ):  # fmt: skip
        self.plan, self.ctx, self.module, self.device = plan, ctx, module, current_device()
        self.global_step = self.skipped_steps = 0
        self._follows = ""  # id of the checkpoint that was saved or loaded last
        self._spec, self._dtype = spec, DTYPES[plan.precision.dtype]
        kernel = choose_kernel(plan.config.actor.model.attention_kernel, self.device, self._dtype, spec.head_dim)
        windows = frozenset(spec.window(i) for i in range(spec.num_layers))
        self._options = replace(options, kernel=kernel, windows=windows)
        groups = parameter_groups(module)
        self.ds: PipelineAdapter | PlainAdapter = build_adapter(module, ctx, plan, groups, self._dtype)
        self._divisor = self.ds.divisor
        self._agreed = self._warned = False
        self._reference: Reference | None = None
        self.critic: Engine | None = None
        start_memory_peak(self.device)

    @property
    def attention_kernel(self) -> str:
        """Name of the attention kernel in use (`actor.model.attention_kernel` forces one)."""
        assert self._options.kernel is not None
        return self._options.kernel.name

    @property
    def transport(self) -> str:
        """What collectives of all ranks go through: nccl, gloo or shared memory (`runner.cpu_backend`)."""
        return transport()

    # --- one batch --------------------------------------------------------------------------------------------------

    @own_modes()
    def train_batch(self, batch: StepBatch, objective: Objective = SUPERVISED) -> StepResult:
        """One optimizer step over the global batch of which `batch` holds this dp rank's rows.

        Loss, gradients and norm are those of the mean over all valid tokens (or what `objective` says) of the global
        batch, whatever the layout. Collective over the world.

        Raises:
            DataError: on every rank, for a batch without rows and for rows that the model cannot take; at the first
                step, when ranks of one dp replica were given different rows.
        """
        started = time.perf_counter()
        counts = self._checked(batch, objective)
        scales = self._scales(counts, objective, self.plan.config.actor.loss_normalization)
        lr = set_schedule(self.ds.optimizer, self.plan.schedule, self.global_step - self.skipped_steps)
        scale = loss_scale(self.ds.optimizer) if self.plan.precision.dtype == "fp16" else None
        local = self._local(batch.micro_batches, objective)
        total = float(self.ds.train_step(local, scales))
        loss, metrics = self._reduced(total, local, scales, counts, objective)
        norm = self.ds.get_global_grad_norm()
        skipped = bool(self.ds.optimizer.overflow)
        self.global_step += 1
        self.skipped_steps += skipped
        adapts = skipped and self.plan.precision.adapts(scale)
        result = StepResult(
            **self._about(batch, counts, loss, metrics, started),
            grad_norm=float("nan") if norm is None else float(norm),
            lr=lr,
            skipped=skipped,
            skipped_steps=self.skipped_steps,
            origin=self._origin(batch, local, scales) if skipped and not adapts else None,
            loss_scale=scale,
        )
        start_memory_peak(self.device)  # generation and evaluation before the next step are in its figure
        return result

    @contextmanager
    def recording(self, recorder: Recorder, step: int) -> Iterator[None]:
        """Inside, every instruction and every operation of a process group is timed: one `train_batch`, as a step."""
        with self.ds.recording(recorder), recorder.step(step):
            yield

    @own_modes(grad=False)
    def eval_batch(self, batch: StepBatch, objective: Objective = SUPERVISED) -> BatchResult:
        """Loss over the rows of all dp ranks; nothing is changed.

        Every dp rank passes the same number of micro-batches; it may be none. Collective over the world.

        Raises:
            DataError: on every rank, for rows that the model cannot take.
        """
        started = time.perf_counter()
        counts = self._count(batch.micro_batches, objective)
        scales = self._scales(counts, objective, "token")
        local = self._local(batch.micro_batches, objective)
        total = sum(float(o) * scale for o, scale in zip(self.ds.infer(local), scales))
        loss, metrics = self._reduced(total, local, scales, counts, objective)
        return BatchResult(**self._about(batch, counts, loss, metrics, started))

    @own_modes(grad=False)
    def compute_logprobs(
        self,
        documents: Sequence[Document],
        micro_batch_size: int | None = None,
        temperature: float = 1.0,
        reference: bool = False,
    ) -> list[TokenLogprobs]:
        """Log-probability of each label and entropy of each distribution, per token, for documents in their own order.

        Logits are divided by `temperature`. Micro-batches have `micro_batch_size` documents of a dp rank; where the
        run forms them by a token budget, as many as it holds. `reference`: by the weights of `keep_reference`.

        Every rank passes the same documents and gets all results. Rows are spread over dp; the vocabulary stays sharded
        over tp; the sequence is put back together over cp; the last stage's values go to every stage.

        Raises:
            DataError: on every rank, for documents that the model cannot take.
        """
        batch = self.plan.batch
        budget = batch.max_tokens_per_micro_batch if batch.dynamic else None
        micro_batches = deal(documents, self.ctx.dp, micro_batch_size or batch.micro_batch_size, budget)
        self._count(micro_batches)
        local = self._local(micro_batches, Objective(temperature=temperature))
        with self._reference.in_place() if reference and self._reference else nullcontext():
            outputs = self.ds.infer([replace(b, head="logprobs") for b in local])
        return collect(documents, zip(micro_batches, outputs), self.ctx, self._options, self.device)

    def compute_values(self, documents: Sequence[Document], micro_batch_size: int | None = None) -> list[np.ndarray]:
        """A critic's value of each token, fp32 [n], read where the token's successor is predicted.

        As `compute_logprobs`, whose micro-batches and collectives it has.
        """
        assert self._spec.value_head, "values are a critic's"
        return [found.logprobs for found in self.compute_logprobs(documents, micro_batch_size)]

    def keep_reference(self) -> None:
        """Keep the weights as they are now for `compute_logprobs(reference=True)`: a copy of each shard, on the CPU."""
        self._reference = Reference(self.module)

    @own_modes(grad=False)
    def generate(
        self,
        prompts: Sequence[np.ndarray],
        sampling: Sampling,
        *,
        samples: int = 1,
        step: int = 0,
        decode: Callable[[Sequence[int]], str] | None = None,
        batch_size: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Generated]:
        """`samples` responses to each prompt (int64 [n], n >= 1) by the weights as they are; prompt-major.

        Tokens depend on (sampling.seed, step, the prompt's place in `prompts`, sample), not on the layout or the batch.
        Every rank passes the same and gets all. Rows are spread over dp x cp. Collective over the world.

        Args:
            step: number of the RL step, for the noise.
            decode: text of token ids, for `sampling.stop`.
            batch_size: rows that a replica decodes at a time; None = all of its share.
            progress: called with (responses done, responses) of this replica, whenever some end.

        Raises:
            DataError: on every rank, for an empty prompt or an unknown id, and where ranks pass different prompts.
            ConfigErrors: the model is not this package's decoder; ranks hold several runs of its layers.
        """
        request = Request(prompts, sampling, samples, step, decode, batch_size, progress)
        request.check(self._spec.vocab_size)
        if self.plan.pipeline.chunks > 1:
            key, rule = asked_chunks(self.plan.config.actor.model), "generation goes through one run of layers a rank"
            raise ConfigErrors([ConfigError(*key, rule, "set it to null, or pipeline_schedule: 1f1b, gpipe or zb-h1")])
        stage = Stage(self.module.forward_funcs, self.ds.gather)
        return Generator(stage, self.ctx, self._spec.hidden_size, self._dtype, self.device).run(request)

    def _checked(self, batch: StepBatch, objective: Objective) -> Counts:
        if not self._agreed:
            check_agreement(batch, self.ctx)
            self._agreed = True
        if not batch.micro_batches:
            raise DataError("data: a step without micro-batches")
        counts = self._count(batch.micro_batches, objective)
        if counts.valid == 0 and not self._warned and self.ctx.rank == 0:
            self._warned = True
            warnings.warn(
                f"step {self.global_step + 1}: no row of the batch has a label; loss and gradients are 0", stacklevel=4
            )
        return counts

    def _count(self, micro_batches: Sequence[MicroBatch], objective: Objective = SUPERVISED) -> Counts:
        needs = objective.rule.needs
        return count_tokens(micro_batches, self._spec.vocab_size, self.ctx, self.device, self._places, needs)

    def _places(self, micro_batch: MicroBatch) -> int:
        """Token places of a micro-batch over cp."""
        plan = sequence_plan(micro_batch, self.ctx, self._options)
        return plan.batch * plan.local_length * self.ctx.cp.size

    def _local(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> list[LocalBatch]:
        size = self._spec.hidden_size
        return [local_batch(mb, self.ctx, self._options, size, self.device, objective) for mb in micro_batches]

    def _scales(self, counts: Counts, objective: Objective, normalization: str) -> list[float]:
        return loss_scales(counts, objective, normalization, self._divisor, self.ctx.dp.size)

    def _reduced(
        self, total: float, local: Sequence[LocalBatch], scales: Sequence[float], counts: Counts, objective: Objective
    ) -> tuple[float, dict[str, float]]:
        """Loss and metrics of the global batch. Collective over the world."""
        sums = sum_over_model([total, *reported(local, scales, objective)], self.ctx, self.device)
        rule = objective.rule
        by = [max(counts.valid, 1)] * len(rule.means) + [self._divisor * (objective.factor or 1.0)] * len(rule.parts)
        metrics = {name: x / n for name, x, n in zip((*rule.means, *rule.parts), sums[1:], by)}
        return sums[0] / self._divisor, metrics

    def _origin(self, batch: StepBatch, local: Sequence[LocalBatch], scales: Sequence[float]) -> str:
        """Where a step that was skipped went wrong, by running it again. Collective over the world."""
        mine = self.ds.inspect(local, scales)
        found = [fault for fault in gather_objects((mine, self.ctx.rank) if mine else None, world_axis()) if fault]
        if not found:
            return "run again, every tensor is finite: a sum over ranks or micro-batches was not, or the hardware erred"
        first, rank = min(found)
        text = ""
        if rank == self.ctx.rank and first.micro >= 0:
            rows = [str(d.row_id) for row in batch.micro_batches[first.micro] for d in row if valid_tokens(((d,),))]
            text = f", micro-batch {first.micro + 1} of {len(local)} (rows {', '.join(rows) or 'without labels'})"
        return f"rank {rank}{gather_objects(text, world_axis())[rank]}: {first.what} is not finite"

    def _about(
        self, batch: StepBatch, counts: Counts, loss: float, metrics: dict[str, float], started: float
    ) -> dict[str, Any]:
        """What both kinds of result say. Collective over the world."""
        memory = device_memory(self.device)
        mine = [time.perf_counter() - started, float(peak_memory_bytes(self.device)), *memory.values()]
        seconds, peak, *most = max_scalars(mine, world_axis(), self.device)
        return {
            "step": self.global_step,
            "loss": loss,
            "valid_tokens": counts.valid,
            "tokens": counts.tokens,
            "step_time_s": seconds,
            "peak_memory_bytes": int(peak),
            "rows_seen": batch.row_ids,
            "padding": 1.0 - counts.tokens / counts.places if counts.places else 0.0,
            "metrics": metrics | dict(zip(memory, most)),
        }

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> TrainState:
        """What checkpoints are made of, as it is now."""
        access = OptimizerState(self.ds.optimizer, self.ctx.dp_cp)
        steps = (self.global_step, self.skipped_steps)
        return TrainState(self.module, access, self.ctx, self.plan, *steps, follows=self._follows)

    def replica_faults(self) -> list[str]:
        """Copies of weights, masters and moments that are not equal to the bit; see `engine.replicas`.

        Collective over the world.
        """
        found = replica_faults(self.module, OptimizerState(self.ds.optimizer, self.ctx.dp_cp))
        return found + [f"critic: {line}" for line in (self.critic.replica_faults() if self.critic else ())]

    def save_checkpoint(
        self, directory: str | Path, state: Mapping[str, Any] | None = None, number: int | None = None
    ) -> Saved:
        """Write `directory/global_step_N`, which any layout can load, and `directory/latest`; atomic.

        `state` (JSON-ready: data position ...) is handed back by `load_checkpoint`. N is `number`, else the optimizer
        steps done. Collective over the world.
        """
        return self.begin_save(directory, state, number).finish()

    def begin_save(
        self, directory: str | Path, state: Mapping[str, Any] | None = None, number: int | None = None,
        background: bool = False,
    ) -> Save:  # fmt: skip
        """`save_checkpoint`, of which `Save.finish` is the end; one at a time. Collective over the world.

        `background`: what this rank stores is copied, and training may go on while it is written.
        """
        critic = None if self.critic is None else self.critic.state
        return begin_save(
            self.state, directory, state, number, critic=critic, background=background, whole=self._was_saved
        )

    def _was_saved(self, saved: Saved) -> None:
        self._follows = saved.id

    def load_checkpoint(self, directory: str | Path) -> dict[str, Any]:
        """Restore weights, optimizer state and step from `save_checkpoint`'s output; returns its `state`.

        `directory`: a folder of checkpoints (its newest is taken) or one checkpoint. Collective over the world.
        """
        if self.critic is not None:  # first: where it is missing, nothing of the actor is overwritten
            actor = together(world_axis(), lambda: find_checkpoint(directory))
            self.critic.load_checkpoint(together(world_axis(), lambda: critic_beside(actor)))
            directory = actor
        manifest = load_checkpoint(self.state, directory)
        self.global_step = self.ds.global_steps = manifest.step
        self._follows = manifest.id
        self.skipped_steps = manifest.skipped
        return dict(manifest.state)

    def hf_tensors(self, dtype: str = "same", bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of the current weights in Hugging Face form, on every rank, bucket by bucket.

        What weight updates of vLLM and SGLang take. Every rank must draw all of it. Collective over the world.

        Args:
            dtype: fp32, bf16, fp16 or same (the run's precision).
        """
        return HfTensors(self.state).stream(self._dtype if dtype == "same" else DTYPES[dtype], bucket_bytes)

    def export_hf(
        self, directory: str | Path, dtype: str = "same", max_shard_size: str = "5GB", force: bool = False,
        stop: Callable[[], bool] = lambda: False,
    ) -> Path:  # fmt: skip
        """Write a Hugging Face folder (config.json, safetensors, tokenizer files). Collective over the world.

        `dtype`: fp32, bf16, fp16 or same (the run's precision); an existing folder is replaced only with `force`.
        `stop`: see `checkpoint.export.export_hf`.
        """
        return export_hf(self.state, directory, dtype, max_shard_size, force, stop)
