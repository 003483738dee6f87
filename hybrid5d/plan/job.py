"""What a forecast prices: sizes, degrees, schedule and precision of one run, without YAML or DeepSpeed. Pure.

`job_of` makes it from a plan; the search varies it and tests build it for published runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from hybrid5d.config.dtypes import PRECISIONS
from hybrid5d.hf.rope import RopeSpec
from hybrid5d.hf.spec import ModelSpec
from hybrid5d.plan.deepspeed_config import offload_ratio
from hybrid5d.plan.draft import ranks_per_node
from hybrid5d.plan.layout import ParallelLayout
from hybrid5d.plan.pipeline import UNIT, Schedule, Timeline, timeline
from hybrid5d.plan.run import RecomputePlan, RunPlan
from hybrid5d.plan.sequence import SequencePlan
from hybrid5d.plan.sequence_rules import ulysses_degree
from hybrid5d.plan.tensors import elements_on, kv_cut

DEEPSPEED_DEFAULTS = {
    "reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000, "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_max_live_parameters": 1_000_000_000, "stage3_param_persistence_threshold": 100_000,
}  # fmt: skip

NO_RECOMPUTE = RecomputePlan()


@dataclass(frozen=True)
class Job:
    """One training step's shape.

    Attributes:
        stages: decoder layers by stage in model order, one entry for each of `schedule.stages`.
        micro_batches, micro_batch: of a dp rank and optimizer step; rows in each.
        seq: tokens of a row, padded.
        batch, local: b and S/cp of a rank's tensors.
        zero: stage that runs (1, 2 or 3).
        offload: part of the optimizer state in host memory.
        moments: fp32 numbers an element that the optimizer keeps (Adam 2, SGD with momentum 1, without 0).
        buckets: sizes of DeepSpeed's buckets in elements, by its key.
        node: ranks of a node.
    """

    spec: ModelSpec
    layout: ParallelLayout
    stages: tuple[int, ...]
    schedule: Schedule
    micro_batches: int
    micro_batch: int
    seq: int
    sp: bool = False
    precision: str = "bf16"
    zero: int = 1
    recompute: RecomputePlan = NO_RECOMPUTE
    cp_method: str = "p2p"
    ulysses: int = 1
    balance: str = "zigzag"
    packed: bool = False
    offload: float = 0.0
    moments: int = 2
    buckets: tuple[tuple[str, int], ...] = ()
    node: int = 8

    @property
    def size(self) -> int:
        """Bytes of one number of weights and activations."""
        return PRECISIONS[self.precision].size

    @property
    def shards(self) -> int:
        """Ranks that ZeRO spreads over: dp x cp."""
        return self.layout.dp * self.layout.cp

    def bucket(self, name: str) -> int:
        """Elements of a bucket, DeepSpeed's default where the run says nothing."""
        return dict(self.buckets).get(name, DEEPSPEED_DEFAULTS[name])

    @cached_property
    def sequence(self) -> SequencePlan:
        """How one full micro-batch is cut over cp."""
        cp, tp = self.layout.cp, self.layout.tp
        rows = ((self.seq,),) * self.micro_batch
        return SequencePlan.build(
            rows, cp, self.cp_method, self.ulysses, self.balance, tp if self.sp else 1, self.packed
        )

    @cached_property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank, padding included: b * S/cp."""
        return self.sequence.batch * self.sequence.local_length

    @property
    def stream(self) -> int:
        """Tokens of the residual stream on one rank: with SP a tp-th of `tokens`."""
        return self.tokens // self.layout.tp if self.sp else self.tokens

    @property
    def kv_heads(self) -> int:
        """Key-value heads of a tp rank."""
        return kv_cut(self.spec.num_key_value_heads, self.layout.tp).per_rank

    def rank_layers(self, rank: int) -> int:
        """Decoder layers of a pipeline rank."""
        return sum(self.stages[s] for s in self.schedule.held(rank))

    def elements(self, rank: int) -> int:
        """Numbers of weights that one tp rank of a pipeline rank holds; a tied matrix once a rank."""
        return _elements(self.spec, self.layout.tp, self.stages, tuple(self.schedule.held(rank)))

    @property
    def times(self) -> Played:
        """The program at unit costs."""
        return played(self.schedule, self.micro_batches)


@dataclass(frozen=True)
class Played:
    """A program at unit costs F = B = W = 1 (a whole backward 2), by pp rank where a tuple."""

    makespan: float
    bubble: float
    live: tuple[int, ...]
    idle_inside: tuple[float, ...]


SHORT = 4  # micro-batches a stage that fill any of the schedules; beyond, each adds what it costs


@lru_cache(maxsize=4096)
def played(schedule: Schedule, micro_batches: int) -> Played:
    """Play a step through; a long one in a short form whose micro-batches are congruent modulo pp.

    With the pipeline full each further run of micro-batches costs their work and nothing else, gpipe's activations
    excepted: it keeps all of them.
    """
    pp, work = schedule.pp, 3 * schedule.chunks
    short = SHORT * pp + micro_batches % pp
    played_through = min(micro_batches, short)
    times = _short(schedule, played_through)
    makespan = times.makespan + work * (micro_batches - played_through)
    live = (micro_batches,) * pp if schedule.kind == "gpipe" else times.live
    return Played(makespan, 1 - work * micro_batches / makespan, live, times.idle_inside)


@lru_cache(maxsize=4096)
def _short(schedule: Schedule, micro_batches: int) -> Timeline:
    """Shared by the long steps that are congruent."""
    return timeline(schedule, micro_batches, UNIT)


_stage_elements = lru_cache(maxsize=4096)(elements_on)


@lru_cache(maxsize=4096)
def _elements(spec: ModelSpec, tp: int, stages: tuple[int, ...], mine: tuple[int, ...]) -> int:
    total = sum(_stage_elements(spec, stages, s, tp) for s in mine)
    if spec.tied and len(mine) > 1 and {0, len(stages) - 1} <= set(mine):
        total -= -(-spec.vocab_size // tp) * spec.hidden_size  # zbv: both ends on one rank, one matrix
    return total


def spec_of(plan: RunPlan) -> ModelSpec | None:
    """The model's sizes: the folder's, or those that the YAML names (untied, without biases); None: too few."""
    if plan.model is not None:
        return plan.model
    model = plan.config.actor.model
    layers, hidden, heads = model.num_layers, model.hidden_size, model.num_attention_heads
    inner, vocab = model.ffn_hidden_size, model.padded_vocab_size
    if not (layers and hidden and heads and inner and vocab) or hidden % heads:
        return None
    return ModelSpec(
        model_type="llama", vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_layers=layers,
        num_attention_heads=heads, num_key_value_heads=model.num_query_groups or heads, head_dim=hidden // heads,
        rms_norm_eps=1e-5, max_position_embeddings=plan.config.row_length or 4096, tie_word_embeddings=False,
        rope=RopeSpec(),
    )  # fmt: skip


def job_of(plan: RunPlan, gpus_per_node: int) -> Job | None:
    """What the plan amounts to; None where the model's sizes or the row length are not known."""
    spec, config, batch = spec_of(plan), plan.config, plan.batch
    seq = config.row_length or (plan.model.max_position_embeddings if plan.model else None)
    if spec is None or seq is None or not plan.stages:
        return None
    layout, model, optim = plan.layout, config.actor.model, config.actor.optim
    rows, length = batch.micro_batch_size, seq
    if batch.max_tokens_per_micro_batch:
        rows, length = 1, max(batch.max_tokens_per_micro_batch, seq)
    zero = plan.deepspeed.get("zero_optimization", {})
    node = min(gpus_per_node, ranks_per_node(config, layout.world_size))
    return Job(
        spec=spec, layout=layout, stages=plan.stages, schedule=plan.pipeline,
        micro_batches=batch.gradient_accumulation_steps, micro_batch=rows, seq=length, sp=plan.sequence_parallel,
        precision=plan.precision.dtype, zero=plan.zero_stage, recompute=plan.recompute, cp_method=model.cp_comm_type,
        ulysses=ulysses_degree(
            model.cp_comm_type, model.hierarchical_context_parallel_sizes, spec.num_key_value_heads, layout.tp,
            layout.cp, node,
        ),
        balance=model.cp_load_balance, packed=config.data.packing == "documents",
        offload=offload_ratio(config) if optim.optimizer_cpu_offload else 0.0,
        moments=2 if optim.optimizer != "sgd" else int(optim.sgd_momentum > 0),
        buckets=tuple((k, zero[k]) for k in DEEPSPEED_DEFAULTS if isinstance(zero.get(k), int)),
        node=node,
    )  # fmt: skip
