"""DeepSpeed's PipelineModule, cut exactly where the plan says and handed the micro-batch beside the hidden state."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.utils.checkpoint
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from hybrid5d.engine.deepspeed.parameters import tag_for_deepspeed
from hybrid5d.models.batch import LocalBatch
from hybrid5d.models.decoder import LayerDef
from hybrid5d.parallel.context import ParallelContext
from hybrid5d.plan.pipeline import Schedule
from hybrid5d.plan.run import RecomputePlan


class _Spec(LayerSpec):
    """A LayerSpec that calls our factory; DeepSpeed's own wants a class."""

    def __init__(self, factory: Callable[[], nn.Module]):
        super().__init__(nn.Module)
        self.factory = factory

    def build(self, log: bool = False) -> nn.Module:
        return self.factory()


class _TiedSpec(TiedLayerSpec):
    """The same for a layer that shares its weight."""

    def __init__(self, layer: LayerDef):
        super().__init__(layer.tied, nn.Module, forward_fn=layer.call, tied_weight_attr="weight")
        self.factory = layer.build

    build = _Spec.build


def stage_bounds(layers: Sequence[LayerDef], stages: Sequence[int]) -> list[int]:
    """Boundaries of the stages in `layers`, from the number of decoder layers of each.

    What stands before the first decoder layer goes to the first stage, what stands after the last one to the last.

    Raises:
        ValueError: the counts do not add up to the decoder layers there are.
    """
    decoders = [i for i, layer in enumerate(layers) if layer.kind == "decoder"]
    if sum(stages) != len(decoders):
        raise ValueError(f"stages {tuple(stages)} hold {sum(stages)} decoder layers but the model has {len(decoders)}")
    first = decoders[0] if decoders else 1
    bounds, at = [0], first
    for count in stages[:-1]:
        at += count
        bounds.append(at)
    return [*bounds, len(layers)]


def recomputed_segments(kinds: Sequence[str], plan: RecomputePlan) -> list[tuple[int, int, bool]]:
    """Runs of a stage's layers as (start, stop, recompute), by Megatron's meaning of the keys.

    `uniform`: groups of `num_layers` decoder layers, each kept as one input. `block`: the first `num_layers`, one by
    one. Granularity `selective` is the attention core's own business.
    """
    decoders = [i for i, kind in enumerate(kinds) if kind == "decoder"]
    n, groups = plan.num_layers or 0, list[tuple[int, int]]()
    if plan.granularity == "full" and plan.method == "block":
        groups = [(i, i + 1) for i in decoders[:n]]
    elif plan.granularity == "full" and plan.method == "uniform" and decoders:
        end = decoders[-1] + 1
        groups = [(i, min(i + n, end)) for i in range(decoders[0], end, n)]
    segments, at = [], 0
    for start, stop in groups:
        if at < start:
            segments.append((at, start, False))
        segments.append((start, stop, True))
        at = stop
    if at < len(kinds):
        segments.append((at, len(kinds), False))
    return segments


class HybridPipelineModule(PipelineModule):
    """This rank's layers, one run of them for each of its chunks; what the last stage's run returns is the head's.

    DeepSpeed knows one run a rank: it gets the layers in the order of ranks, then chunks, so that a rank's are
    neighbours and it still sees which rank owns which, tied ones included.

    cp is part of DeepSpeed's data axis (deepspeed.md: Context parallelism is data parallelism to DeepSpeed), so ZeRO
    shards and gradients reduce over dp x cp and the norm over pp x tp.
    """

    def __init__(
        self,
        layers: Sequence[LayerDef],
        ctx: ParallelContext,
        schedule: Schedule,
        stages: Sequence[int],
        recompute: RecomputePlan,
    ):
        layout, bounds = ctx.layout, stage_bounds(layers, stages)
        runs = [layers[bounds[s] : bounds[s + 1]] for rank in range(schedule.pp) for s in schedule.held(rank)]
        ends = list(accumulate((len(run) for run in runs), initial=0))
        self._bounds = ends[:: schedule.chunks]
        layers = [layer for run in runs for layer in run]
        topology = PipeModelDataParallelTopology(num_pp=layout.pp, num_mp=layout.tp, num_dp=layout.dp * layout.cp)
        specs = [_TiedSpec(d) if d.tied else _Spec(d.build) for d in layers]
        # It prints its topology, and broadcasts tied weights where autograd sees it (deepspeed.md: Output).
        with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            super().__init__(specs, topology=topology, partition_method="given")
        at = topology.get_coord(ctx.rank)
        mine = (ctx.pp.rank, ctx.dp_cp.rank, ctx.tp.rank)
        if (at.pipe, at.data, at.model) != mine:
            raise RuntimeError(f"rank {ctx.rank}: DeepSpeed places it at {at}, the layout at {mine}")
        self._segments: list[list[tuple[int, int, bool]]] = []  # of each chunk, as indices of forward_funcs
        mine_from = ctx.pp.rank * schedule.chunks
        for run, start in zip(runs[mine_from:], ends[mine_from : mine_from + schedule.chunks]):
            start -= self._local_start
            segments = recomputed_segments([layer.kind for layer in run], recompute)
            self._segments.append([(start + a, start + b, again) for a, b, again in segments])
        self._random = any(_draws(m) for m in self.modules())  # our decoder does not
        tag_for_deepspeed(self)

    def _partition_layers(self, method: str = "given") -> None:
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = list(self._bounds)
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    def _run(self, start: int, stop: int, x: Tensor | None, batch: LocalBatch) -> Any:
        for layer in self.forward_funcs[start:stop]:
            x = layer(x, batch)
        return x

    def forward(self, x: Tensor | None, batch: LocalBatch, chunk: int = 0) -> Any:  # type: ignore[override]
        """x [b, s, H] (None on the first stage) through the layers of one of this rank's chunks."""
        for start, stop, recompute in self._segments[chunk]:
            if recompute and torch.is_grad_enabled():  # ours, not DeepSpeed's (deepspeed.md: Recomputation)
                x = torch.utils.checkpoint.checkpoint(
                    partial(self._run, start, stop), x, batch, use_reentrant=False, preserve_rng_state=self._random
                )
            else:
                x = self._run(start, stop, x, batch)
        return x


def _draws(module: nn.Module) -> bool:
    """Whether it drops at random: recomputation must draw the same numbers again."""
    rates = (getattr(module, name, 0.0) for name in ("p", "dropout", "drop_rate"))
    return any(isinstance(rate, float) and rate > 0 for rate in rates)
