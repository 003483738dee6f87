"""From a validated plan to an Engine: groups, layers, start weights, DeepSpeed."""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybrid5d.checkpoint.start_weights import load_hf_weights
from hybrid5d.context_parallel import ContextParallelAttention, hybrid_axes
from hybrid5d.context_parallel.kernels import available_kernels, device_capability, kernel_notices
from hybrid5d.engine.collate import SequenceOptions
from hybrid5d.engine.deepspeed.distributed import current_device, ensure_distributed
from hybrid5d.engine.deepspeed.parameters import freeze
from hybrid5d.engine.deepspeed.pipeline_module import HybridPipelineModule
from hybrid5d.engine.engine import Engine
from hybrid5d.engine.step import own_modes
from hybrid5d.errors import ConfigError, ConfigErrors
from hybrid5d.hf.folder import KEY, weights_wanted
from hybrid5d.hf.spec import ModelSpec
from hybrid5d.models.decoder import LayerDef, ValueHead, decoder_layers
from hybrid5d.models.dtypes import DTYPES
from hybrid5d.models.init import init_weights
from hybrid5d.parallel.context import Axis, ParallelContext
from hybrid5d.parallel.same import flat, of_this_process
from hybrid5d.plan.draft import ranks_per_node
from hybrid5d.plan.run import RunPlan
from hybrid5d.plan.sequence_rules import ulysses_degree

BF16_CAPABILITY = (8, 0)
LayerFactory = Callable[[ModelSpec, ParallelContext, Callable[[], ContextParallelAttention]], list[LayerDef]]


def sequence_options(plan: RunPlan) -> SequenceOptions:
    """How this plan pads and cuts rows."""
    model, layout = plan.config.actor.model, plan.layout
    kv_heads = plan.model.num_key_value_heads if plan.model else 1
    sizes, node = model.hierarchical_context_parallel_sizes, ranks_per_node(plan.config, layout.world_size)
    return SequenceOptions(
        method=model.cp_comm_type,
        load_balance=model.cp_load_balance,
        ulysses=ulysses_degree(model.cp_comm_type, sizes, kv_heads, layout.tp, layout.cp, node),
        packed=plan.config.data.packing == "documents",
    )


def attention_factory(
    ctx: ParallelContext, options: SequenceOptions, kernel: str
) -> Callable[[], ContextParallelAttention]:
    """Makes the attention core of each layer; builds the Ulysses and ring groups once. Collective over the world."""
    ulysses, ring = Axis.single(), Axis.single()
    if ctx.cp.size > 1 and options.method == "a2a+p2p":
        ulysses, ring = hybrid_axes(ctx.layout, ctx.rank, options.ulysses)
    return lambda: ContextParallelAttention(ctx.cp, method=options.method, ulysses=ulysses, ring=ring, kernel=kernel)


@own_modes()
def initialize(
    plan: RunPlan,
    layers: LayerFactory | None = None,
    facts: Mapping[str, Any] | None = None,
    met: Callable[[dist.Store], None] = lambda store: None,
) -> Engine:
    """Build the model of a plan on this rank and hand it to DeepSpeed. Collective over the world.

    Args:
        layers: makes the pipeline's layers in place of our decoder (bring your own model: examples/custom_model.py).
        facts: what else must be the same on all ranks (the data's identity), JSON-ready. The plan's settings and the
            versions always are; a difference ends the job where this call makes the process group.
        met: called before the group is made, with the store through which all ranks have met.

    Raises:
        ConfigErrors: what only a running process can know (fp16 on a CPU, no model folder, hosts that differ).
    """
    shared = {**dict(flat(plan.config.to_tree())), **of_this_process(), **_model_files(plan, KEY), **(facts or {})}
    if plan.critic is not None:
        shared |= _model_files(plan.critic, "critic.model.model_path")
    ensure_distributed(
        plan.config.actor.megatron.distributed_timeout_minutes, plan.config.runner.cpu_backend, shared, met
    )
    engine = _built(plan, layers)
    if plan.critic is not None:
        engine.critic = _built(plan.critic)
    return engine


def _spec(plan: RunPlan) -> ModelSpec:
    """Raises ConfigErrors where no folder says what the model is."""
    if plan.model is None:
        rule = "training needs the model's config.json"
        raise ConfigErrors([ConfigError("actor.model.model_path", None, rule, "name a folder")])
    return plan.model


def _built(plan: RunPlan, layers: LayerFactory | None = None) -> Engine:
    """The engine of one model, in the process group that is there. Collective over the world."""
    spec, device = _spec(plan), current_device()
    _refuse_at_run_time(plan, spec, device)
    ctx = ParallelContext.create(plan.layout, plan.sequence_parallel)
    model, options = plan.config.actor.model, sequence_options(plan)
    if model.attention_kernel == "auto" and ctx.rank == 0:
        for notice in kernel_notices(device, DTYPES[plan.precision.dtype], spec.head_dim):
            warnings.warn(notice, stacklevel=3)
    attention = attention_factory(ctx, options, model.attention_kernel)
    if layers is None:
        selective = plan.recompute.granularity == "selective"
        defs = decoder_layers(spec, ctx, attention, selective_recompute=selective)
    else:
        defs = layers(spec, ctx, attention)
    module = HybridPipelineModule(defs, ctx, plan.pipeline, plan.stages, plan.recompute)
    if weights_wanted(model.load_weights, model.model_path):
        for head in (m for m in module.modules() if isinstance(m, ValueHead)):  # the folder need not hold one
            init_weights(head, plan.config.actor.seed, spec.initializer_range)
        load_hf_weights(module, str(model.model_path), spec)
    else:
        init_weights(module, plan.config.actor.seed, spec.initializer_range)
    freeze(module, plan.config.actor.freeze_parameters)
    return Engine(plan, spec, ctx, module, options)


def _model_files(plan: RunPlan, key: str) -> dict[str, Any]:
    """What must be the same in every host's model folder: config.json, and the weights' sizes (they are not read)."""
    model, raw = plan.config.actor.model, json.dumps(_spec(plan).raw, sort_keys=True)
    found: dict[str, Any] = {f"{key}: hash of config.json": zlib.crc32(raw.encode())}
    if weights_wanted(model.load_weights, model.model_path):
        weights = sorted(Path(str(model.model_path)).glob("*.safetensors"))
        found[f"{key}: bytes of weights"] = {path.name: path.stat().st_size for path in weights}
    return found


def _refuse_at_run_time(plan: RunPlan, spec: ModelSpec, device: torch.device) -> None:
    errors = []
    if plan.precision.dtype == "fp16" and device.type == "cpu":
        rule = "fp16 training does not run on a CPU"
        errors.append(ConfigError("actor.model.precision", "fp16", rule, "use bf16 or fp32 here, fp16 on a GPU"))
    dtype = DTYPES[plan.precision.dtype]
    if dtype == torch.bfloat16 and device.type == "cuda" and device_capability(device) < BF16_CAPABILITY:
        (most, least), (a, b) = BF16_CAPABILITY, device_capability(device)
        rule = f"bf16 needs compute capability {most}.{least}, this device has {a}.{b}"
        errors.append(ConfigError("actor.model.precision", "bf16", rule, "use fp16 or fp32"))
    kernel = plan.config.actor.model.attention_kernel
    names = available_kernels(device, dtype, spec.head_dim)
    if kernel not in ("auto", *names):
        rule = f"cannot run {plan.precision.dtype} on {device.type} with head size {spec.head_dim}"
        errors.append(ConfigError("actor.model.attention_kernel", kernel, rule, f"use auto or {', '.join(names)}"))
    if errors:
        raise ConfigErrors(errors)
