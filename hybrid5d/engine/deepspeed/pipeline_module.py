"""DeepSpeed's PipelineModule, told exactly where to cut and handed the micro-batch beside the hidden state."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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


@dataclass(frozen=True)
class Recompute:
    """Which decoder layers of a stage recompute their activations in backward (Megatron's meaning of the keys).

    `uniform`: groups of `num_layers` layers, each kept as one input. `block`: the first
    `num_layers` of the stage, one by one.
    """

    method: str | None = None
    num_layers: int = 0


class _Spec(LayerSpec):
    """A LayerSpec that calls our factory; DeepSpeed's own wants a class."""

    def __init__(self, factory: Callable[[], nn.Module]):
        super().__init__(nn.Module)
        self.factory = factory

    def build(self, log: bool = False) -> nn.Module:
        return self.factory()


class _TiedSpec(TiedLayerSpec):
    """The same for a layer that shares its weight."""

    def __init__(self, key: str, factory: Callable[[], nn.Module], forward_fn: Callable[..., Any] | None):
        super().__init__(key, nn.Module, forward_fn=forward_fn, tied_weight_attr="weight")
        self.factory = factory

    def build(self, log: bool = False) -> nn.Module:
        return self.factory()


def _spec_of(layer: LayerDef) -> LayerSpec:
    if not layer.tied:
        return _Spec(layer.build)
    return _TiedSpec(layer.tied, layer.build, None if layer.call is None else _call_tied(layer.call))


def _call_tied(call: Callable[[nn.Module, Tensor, LocalBatch], Any]) -> Callable[..., Any]:
    def forward(module: nn.Module, x: Tensor, batch: LocalBatch) -> Any:
        return call(module, x, batch)

    return forward


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


class HybridPipelineModule(PipelineModule):
    """This rank's stage. `forward(x, batch)`; the last stage returns what the head computes.

    cp is part of DeepSpeed's data axis (deepspeed.md: Context parallelism is data parallelism to DeepSpeed), so ZeRO
    shards and gradients reduce over dp x cp and the norm over pp x tp.
    """

    def __init__(
        self,
        layers: Sequence[LayerDef],
        ctx: ParallelContext,
        stages: Sequence[int],
        recompute: Recompute | None = None,
    ):
        self._bounds = stage_bounds(layers, stages)
        self.recompute = recompute or Recompute()
        layout = ctx.layout
        topology = PipeModelDataParallelTopology(num_pp=layout.pp, num_mp=layout.tp, num_dp=layout.dp * layout.cp)
        # It prints its topology, and broadcasts tied weights where autograd sees it (deepspeed.md: Output).
        with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            super().__init__([_spec_of(layer) for layer in layers], topology=topology, partition_method="given")
        at = topology.get_coord(ctx.rank)
        mine = (ctx.pp.rank, ctx.dp_cp.rank, ctx.tp.rank)
        if (at.pipe, at.data, at.model) != mine:
            raise RuntimeError(f"rank {ctx.rank}: DeepSpeed places it at {at}, the layout at {mine}")
        kinds = [layer.kind for layer in layers[self._local_start : self._local_stop]]
        self._segments = self._plan_segments(kinds)
        tag_for_deepspeed(self)

    def _partition_layers(self, method: str = "given") -> None:
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = list(self._bounds)
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    def _plan_segments(self, kinds: Sequence[str]) -> list[tuple[int, int, bool]]:
        """Runs of layers as (start, stop, recompute)."""
        decoders = [i for i, kind in enumerate(kinds) if kind == "decoder"]
        n, method = self.recompute.num_layers, self.recompute.method
        groups: list[tuple[int, int]] = []
        if method == "block":
            groups = [(i, i + 1) for i in decoders[:n]]
        elif method == "uniform" and decoders:
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

    def _run(self, start: int, stop: int, x: Tensor | None, batch: LocalBatch) -> Any:
        for layer in self.forward_funcs[start:stop]:
            x = layer(x, batch)
        return x

    def forward(self, x: Tensor | None, batch: LocalBatch) -> Any:  # type: ignore[override]
        for start, stop, recompute in self._segments:
            if recompute and torch.is_grad_enabled():  # ours, not DeepSpeed's (deepspeed.md: Recomputation)
                x = torch.utils.checkpoint.checkpoint(
                    partial(self._run, start, stop), x, batch, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x = self._run(start, stop, x, batch)
        return x
