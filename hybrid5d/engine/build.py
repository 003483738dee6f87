"""From a validated plan to an Engine: groups, layers, start weights, DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hybrid5d.checkpoint.start_weights import load_hf_weights
from hybrid5d.context_parallel import ContextParallelAttention, hybrid_axes
from hybrid5d.context_parallel.kernels import available_kernels
from hybrid5d.engine.collate import SequenceOptions
from hybrid5d.engine.deepspeed.distributed import ensure_distributed
from hybrid5d.engine.deepspeed.parameters import freeze
from hybrid5d.engine.deepspeed.pipeline_module import HybridPipelineModule, Recompute
from hybrid5d.engine.engine import Engine
from hybrid5d.engine.step import current_device, own_modes
from hybrid5d.errors import ConfigError, ConfigErrors
from hybrid5d.hf.folder import weights_wanted
from hybrid5d.hf.spec import ModelSpec
from hybrid5d.models.decoder import LayerDef, decoder_layers
from hybrid5d.models.dtypes import DTYPES
from hybrid5d.models.init import init_weights
from hybrid5d.parallel.context import Axis, ParallelContext
from hybrid5d.plan.draft import ranks_per_node
from hybrid5d.plan.run import RunPlan
from hybrid5d.plan.sequence_rules import ulysses_degree

LayerFactory = Callable[[ModelSpec, ParallelContext, Callable[[], ContextParallelAttention]], list[LayerDef]]


def sequence_options(plan: RunPlan) -> SequenceOptions:
    """How this plan pads and cuts rows."""
    return SequenceOptions(
        method=plan.config.actor.model.cp_comm_type,
        load_balance=plan.config.actor.model.cp_load_balance,
        ulysses=ulysses_size(plan),
        packed=plan.config.data.packing == "documents",
    )


def ulysses_size(plan: RunPlan) -> int:
    """Ulysses degree of this plan; 1 where its method has none."""
    model, layout = plan.config.actor.model, plan.layout
    kv_heads = plan.model.num_key_value_heads if plan.model else 1
    sizes, node = model.hierarchical_context_parallel_sizes, ranks_per_node(plan.config, layout.world_size)
    return ulysses_degree(model.cp_comm_type, sizes, kv_heads, layout.tp, layout.cp, node)


def attention_factory(plan: RunPlan, ctx: ParallelContext) -> Callable[[], ContextParallelAttention]:
    """Makes the attention core of each layer; builds the Ulysses and ring groups once. Collective over the world."""
    method, kernel = plan.config.actor.model.cp_comm_type, plan.config.actor.model.attention_kernel
    ulysses, ring = Axis.single(), Axis.single()
    if ctx.cp.size > 1 and method == "a2a+p2p":
        ulysses, ring = hybrid_axes(ctx.layout, ctx.rank, ulysses_size(plan))
    return lambda: ContextParallelAttention(ctx.cp, method=method, ulysses=ulysses, ring=ring, kernel=kernel)


@own_modes()
def initialize(plan: RunPlan, layers: LayerFactory | None = None) -> Engine:
    """Build the model of a plan on this rank and hand it to DeepSpeed. Collective over the world.

    Args:
        layers: makes the pipeline's layers in place of our decoder (bring your own model: examples/custom_model.py).

    Raises:
        ConfigErrors: what only a running process can know (fp16 on a CPU, no model folder).
    """
    spec = plan.model
    if spec is None:
        raise ConfigErrors(
            [ConfigError("actor.model.model_path", None, "training needs the model's config.json", "name a folder")]
        )
    ensure_distributed(plan.config.actor.megatron.distributed_timeout_minutes)
    device = current_device()
    _refuse_at_run_time(plan, spec, device)
    ctx = ParallelContext.create(plan.layout, plan.sequence_parallel)
    attention = attention_factory(plan, ctx)
    selective = plan.recompute.granularity == "selective"
    if layers is None:
        defs = decoder_layers(spec, ctx, attention, selective_recompute=selective)
    else:
        defs = layers(spec, ctx, attention)
    full = plan.recompute.granularity == "full"
    recompute = Recompute(plan.recompute.method, plan.recompute.num_layers or 0) if full else Recompute()
    module = HybridPipelineModule(defs, ctx, plan.stages, recompute)
    load_start_weights(module, plan, spec, ctx)
    freeze(module, plan.config.actor.freeze_parameters)
    return Engine(plan, spec, ctx, module, sequence_options(plan))


def load_start_weights(module: nn.Module, plan: RunPlan, spec: ModelSpec, ctx: ParallelContext) -> None:
    """Weights from the model folder's safetensors, or drawn from the run's seed; the same for every layout."""
    model = plan.config.actor.model
    if weights_wanted(model.load_weights, model.model_path):
        load_hf_weights(module, str(model.model_path), spec)
    else:
        init_weights(module, plan.config.actor.seed, spec.initializer_range)


def _refuse_at_run_time(plan: RunPlan, spec: ModelSpec, device: torch.device) -> None:
    errors = []
    if plan.precision.dtype == "fp16" and device.type == "cpu":
        rule = "fp16 training does not run on a CPU"
        errors.append(ConfigError("actor.model.precision", "fp16", rule, "use bf16 or fp32 here, fp16 on a GPU"))
    kernel = plan.config.actor.model.attention_kernel
    names = available_kernels(device, DTYPES[plan.precision.dtype], spec.head_dim)
    if kernel not in ("auto", *names):
        rule = f"cannot run {plan.precision.dtype} on {device.type} with head size {spec.head_dim}"
        errors.append(ConfigError("actor.model.attention_kernel", kernel, rule, f"use auto or {', '.join(names)}"))
    if errors:
        raise ConfigErrors(errors)
