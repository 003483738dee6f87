"""What rules look at: a config on a number of processes, and what follows from it, each computed once."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from hybrid5d.config.schema import RunConfig
from hybrid5d.errors import ConfigError, ConfigErrors, touches
from hybrid5d.hf.spec import ModelSpec
from hybrid5d.plan.batch import BatchPlan, plan_batch
from hybrid5d.plan.deepspeed_config import PrecisionPlan, emit_deepspeed, merge_block, plan_precision
from hybrid5d.plan.emitted import Emitted
from hybrid5d.plan.layout import ParallelLayout
from hybrid5d.plan.lr import LRSchedule, build_schedule
from hybrid5d.plan.model import ModelReading, read_model
from hybrid5d.plan.pipeline import Schedule
from hybrid5d.plan.stages import split_by_cost, split_layers
from hybrid5d.plan.tensors import head_cost

Purpose = Literal["translate", "train", "eval"]  # a run needs its model and data, an evaluation only val data
MODEL_NUMBERS = ("num_layers", "num_attention_heads", "num_query_groups", "padded_vocab_size", "ffn_hidden_size")


@dataclass
class Draft:
    """A plan in the making. Values that follow from `unknown` keys are made of defaults: no rule looks at them.

    Attributes:
        world_size: processes; None: not known.
        gpus_per_node: None: the launcher knows, and only counts matter.
        invalid: keys and blocks without a usable value.
        unchecked: what rules that lack a number of the model write down instead, with the values that would be legal.
        value_head: the model is a critic.
    """

    config: RunConfig
    world_size: int | None
    purpose: Purpose = "translate"
    gpus_per_node: int | None = None
    invalid: Collection[str] = ()
    unchecked: list[str] = field(default_factory=list)
    value_head: bool = False

    @cached_property
    def unknown(self) -> set[str]:
        """What no rule may read: the invalid keys, and `world_size` and `model` where they are not known."""
        unknown = set(self.invalid)
        if self.world_size is None:
            unknown.add("world_size")
        path = self.config.actor.model.model_path
        in_folder = path is not None and (Path(path) / "config.json").is_file()
        names = ("model_path", *(() if in_folder else MODEL_NUMBERS))
        if touches([f"actor.model.{n}" for n in names], self.invalid):
            unknown.add("model")
        return unknown

    @property
    def translation(self) -> bool:
        """Nothing is started."""
        return self.purpose == "translate"

    @property
    def world(self) -> int:
        """Processes; where they are not known, those of one replica."""
        return self.config.actor.model.ranks_per_replica if self.world_size is None else self.world_size

    @cached_property
    def layout(self) -> ParallelLayout:
        """Degrees; at least one replica."""
        model = self.config.actor.model
        return ParallelLayout(
            pp=model.pipeline_model_parallel_size, dp=max(self.world // model.ranks_per_replica, 1),
            cp=model.context_parallel_size, tp=model.tensor_model_parallel_size,
        )  # fmt: skip

    @cached_property
    def _batch(self) -> tuple[BatchPlan, list[ConfigError]]:
        return plan_batch(self.config, self.layout.dp)

    @property
    def batch(self) -> BatchPlan:
        """Rows per step and micro-batch; nominal where it does not close."""
        return self._batch[0]

    @property
    def batch_errors(self) -> list[ConfigError]:
        """What the batch arithmetic breaks."""
        return self._batch[1]

    @cached_property
    def reading(self) -> ModelReading:
        """The model's folder, or the numbers that the YAML gives."""
        return read_model(self.config, not self.translation)

    @property
    def spec(self) -> ModelSpec | None:
        """The model of the folder; None where it is not known."""
        spec = self.reading.spec
        return None if spec is None else replace(spec, value_head=self.value_head)

    @cached_property
    def pipeline(self) -> Schedule:
        """The pipeline schedule; keys that do not fit it are taken for absent."""
        model = self.config.actor.model
        chunks = model.virtual_pipeline_model_parallel_size
        kind = model.pipeline_schedule or ("interleaved" if (chunks or 1) > 1 else "1f1b")
        held = {"zbv": 2, "interleaved": chunks or 2}.get(kind, 1)
        wide = kind == "1f1b" and model.pipeline_warmup == "wide"
        return Schedule(kind, model.pipeline_model_parallel_size, held, wide)

    @cached_property
    def _stages(self) -> tuple[tuple[int, ...], list[ConfigError]]:
        model, layers = self.config.actor.model, self.reading.numbers.num_layers
        if layers is None:
            return (), []
        first, last = model.decoder_first_pipeline_num_layers, model.decoder_last_pipeline_num_layers
        runs = self.pipeline.chunks
        if runs > 1:
            first = last = None  # refused beside several runs (pipeline_rules.pipeline)
        try:
            return split_layers(layers, self.pipeline.stages, first, last, runs), []
        except ConfigErrors as exc:
            return (), list(exc.errors)

    @property
    def stages(self) -> tuple[int, ...]:
        """Decoder layers per stage, in model order; () where they are not known or do not fit."""
        equal, spec = self._stages[0], self.spec
        if self.config.actor.model.pipeline_partition == "uniform" or not equal or spec is None:
            return equal
        return split_by_cost(spec.num_layers, self.pipeline, head_cost(spec, self.config.row_length or 0))

    @property
    def stage_errors(self) -> list[ConfigError]:
        """Why the layers do not fit the stages."""
        return self._stages[1]

    @cached_property
    def schedule(self) -> LRSchedule:
        """Of the learning rate and the weight decay."""
        return build_schedule(self.config, self.batch.global_batch_size)

    @cached_property
    def precision(self) -> PrecisionPlan:
        """Number format, and fp16's loss scale."""
        return plan_precision(self.config)

    @cached_property
    def _deepspeed(self) -> tuple[Emitted, list[ConfigError]]:
        emitted = emit_deepspeed(self.config, self.batch, self.schedule, self.precision, self.translation)
        return emitted, merge_block(emitted, self.config.actor.deepspeed, self.translation, self.unknown)

    @property
    def deepspeed(self) -> Emitted:
        """The ds_config with its sources, `actor.deepspeed` merged last, without what that block may not say."""
        return self._deepspeed[0]

    @property
    def block_errors(self) -> list[ConfigError]:
        """What `actor.deepspeed` may not say."""
        return self._deepspeed[1]


def ranks_per_node(config: RunConfig, world_size: int) -> int:
    """Processes of a node, from cluster.num_nodes; the whole world where they do not divide."""
    nodes = max(config.cluster.num_nodes, 1)
    return world_size // nodes if world_size % nodes == 0 else world_size
