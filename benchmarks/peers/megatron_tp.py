"""Megatron-core: GPTModel of its local layer spec (no Transformer Engine, no apex), its calls of CUDA guarded.

Its training loop needs CUDA; its model, collectives and loss run here under the optimizer that every peer has.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from safetensors.torch import load_file
from torch import Tensor

from peers.decoder import Step, adamw, clip, labelled

torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment]  # only ever used as a tensor's device
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron refuses to start without
megatron_random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()  # nothing is drawn: no dropout


class Norm(torch.nn.RMSNorm):
    """torch's RMSNorm; Megatron's wrapper of it refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def model_of(config: dict[str, Any], length: int, sequence: bool) -> GPTModel:
    """Megatron's model of a Llama configuration on this rank."""
    world = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world, create_gloo_process_groups=False)
    options = TransformerConfig(
        num_layers=config["num_hidden_layers"], hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"], num_query_groups=config["num_key_value_heads"],
        ffn_hidden_size=config["intermediate_size"], kv_channels=config["head_dim"],
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        normalization="RMSNorm", layernorm_epsilon=config["rms_norm_eps"],
        hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True, perform_initialization=False,
        tensor_model_parallel_size=world, sequence_parallel=sequence, gradient_accumulation_fusion=False,
        apply_rope_fusion=False, bias_activation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, persist_layer_norm=False, params_dtype=torch.float32,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    block = TransformerBlockSubmodules(layer_specs=[spec] * config["num_hidden_layers"], layer_norm=Norm)
    return GPTModel(
        options, block, config["vocab_size"], length, position_embedding_type="rope",
        rotary_base=config["rope_parameters"]["rope_theta"], share_embeddings_and_output_weights=False,
    )  # fmt: skip


def load(model: GPTModel, folder: str, config: dict[str, Any]) -> None:
    """Llama's weights in Megatron's order: q, k, v by kv head; gate and up one after the other on each rank."""
    stored, rank, world = load_file(str(Path(folder, "model.safetensors"))), dist.get_rank(), dist.get_world_size()
    groups, dim, hidden = config["num_key_value_heads"], config["head_dim"], config["hidden_size"]

    def rows(x: Tensor) -> Tensor:
        return x.chunk(world, dim=0)[rank]

    def columns(x: Tensor) -> Tensor:
        return x.chunk(world, dim=1)[rank]

    put = {
        "embedding.word_embeddings.weight": rows(stored["model.embed_tokens.weight"]),
        "decoder.final_layernorm.weight": stored["model.norm.weight"],
        "output_layer.weight": rows(stored["lm_head.weight"]),
    }
    for i in range(config["num_hidden_layers"]):
        theirs, ours = f"model.layers.{i}.", f"decoder.layers.{i}."
        q, k, v = (stored[f"{theirs}self_attn.{n}_proj.weight"].view(groups, -1, dim, hidden) for n in "qkv")
        put[f"{ours}self_attention.linear_qkv.weight"] = rows(torch.cat((q, k, v), dim=1)).flatten(0, 2)
        put[f"{ours}self_attention.linear_proj.weight"] = columns(stored[f"{theirs}self_attn.o_proj.weight"])
        gate, up = (rows(stored[f"{theirs}mlp.{n}_proj.weight"]) for n in ("gate", "up"))
        put[f"{ours}mlp.linear_fc1.weight"] = torch.cat((gate, up))
        put[f"{ours}mlp.linear_fc2.weight"] = columns(stored[f"{theirs}mlp.down_proj.weight"])
        put[f"{ours}input_layernorm.weight"] = stored[f"{theirs}input_layernorm.weight"]
        put[f"{ours}pre_mlp_layernorm.weight"] = stored[f"{theirs}post_attention_layernorm.weight"]
    params = dict(model.named_parameters())
    if params.keys() != put.keys():
        raise ValueError(f"Megatron's parameters differ: {sorted(params.keys() ^ put.keys())}")
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(put[name])


def build(folder: str, variant: str, rows: Tensor) -> Step:
    """All rows on every rank."""
    config = json.loads(Path(folder, "config.json").read_text())
    length = rows.shape[1]
    model = model_of(config, length, variant == "sp")
    load(model, folder, config)
    optimizer, tokens, positions = adamw(model), labelled(rows), torch.arange(length)[None]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)  # true where nothing is seen
    seen = [n for n, p in model.named_parameters() if getattr(p, "sequence_parallel", False)]
    vectors = {n: p for n, p in model.named_parameters() if p.dim() == 1}

    def step() -> tuple[float, float]:
        optimizer.zero_grad()
        total = 0.0
        for row in rows:
            per_token = model(row[None], positions, mask, labels=row.roll(-1)[None])  # [1, S]; the last has no label
            loss = per_token[:, :-1].sum() / tokens
            loss.backward()
            total += loss.item()
        if seen:  # each rank saw part of the tokens: one sum for all, as Megatron's finalize_model_grads does
            flat = torch.cat([vectors[n].grad for n in seen])
            dist.all_reduce(flat)
            for n, part in zip(seen, flat.split([vectors[n].numel() for n in seen])):
                vectors[n].grad.copy_(part)
        whole = [p.grad for p in vectors.values()]
        norm = clip([p.grad for p in model.parameters() if p.dim() > 1], whole)
        optimizer.step()
        return total, norm

    return step
