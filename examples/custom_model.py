"""Bring your own model: a GPT-2-like decoder of your own layers, cut over every axis, trained by the same engine.

deepspeed --num_gpus 8 examples/custom_model.py examples/quickstart.yaml runner.max_steps=20
python examples/custom_model.py examples/quickstart.yaml actor.model.tensor_model_parallel_size=1 ...   (one process)

What a layer must do to fit: take `(x, batch)`; keep x at [b, S/cp, H] ([b, S/(cp*tp), H] with sequence parallelism);
build its weights from our tensor-parallel layers, or declare them `replicated`; attend through the `attention` it is
given. The sizes come from the YAML's model folder. Pipeline stages, ZeRO, the loss over all valid tokens and
recomputation follow.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hybrid5d
from hybrid5d.context_parallel import ContextParallelAttention
from hybrid5d.data.build import loader_from_plan
from hybrid5d.hf.spec import ModelSpec
from hybrid5d.models.batch import LocalBatch
from hybrid5d.models.decoder import Head, LayerDef
from hybrid5d.parallel.context import ParallelContext
from hybrid5d.plan.run import build_plan
from hybrid5d.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    replicated,
    split_seq,
)


class LayerNorm(nn.Module):
    """Replicated weight and bias; with SP each rank sees its part of the sequence, so their gradients are partial."""

    def __init__(self, size: int, name: str, ctx: ParallelContext):
        super().__init__()
        for part, value in (("weight", torch.ones(size)), ("bias", torch.zeros(size))):
            param = nn.Parameter(value)
            self.register_parameter(part, replicated(param, ctx.tp, f"{name}.{part}", partial=ctx.sequence_parallel))

    def forward(self, x: Tensor, batch: LocalBatch | None = None) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias)


class Embeddings(nn.Module):
    """Token table cut over the vocabulary plus learned positions."""

    def __init__(self, spec: ModelSpec, ctx: ParallelContext):
        super().__init__()
        sp = ctx.sequence_parallel
        self.tokens = VocabParallelEmbedding(spec.vocab_size, spec.hidden_size, ctx.tp, sp, name="wte")
        table = nn.Parameter(torch.empty(spec.max_position_embeddings, spec.hidden_size))
        self.positions = replicated(table, ctx.tp, "wpe.weight", partial=sp)
        self.ctx = ctx

    def forward(self, x: Tensor | None, batch: LocalBatch) -> Tensor:
        places = split_seq(batch.position_ids, self.ctx.tp) if self.ctx.sequence_parallel else batch.position_ids
        return self.tokens(batch.input_ids) + F.embedding(places, self.positions)


class Block(nn.Module):
    """norm, attention, norm, MLP: columns then rows, twice."""

    def __init__(self, spec: ModelSpec, index: int, ctx: ParallelContext, attention: ContextParallelAttention):
        super().__init__()
        size, tp, sp, name = spec.hidden_size, ctx.tp, ctx.sequence_parallel, f"h.{index}"
        self.head_dim, self.attention = size // spec.num_attention_heads, attention
        self.norm1, self.norm2 = LayerNorm(size, f"{name}.ln_1", ctx), LayerNorm(size, f"{name}.ln_2", ctx)
        names = [f"{name}.attn.{part}" for part in "qkv"]
        self.qkv = ColumnParallelLinear(size, [size] * 3, tp, sequence_parallel=sp, names=names)
        self.out = RowParallelLinear(size, size, tp, sequence_parallel=sp, name=f"{name}.attn.out")
        self.up = ColumnParallelLinear(size, 4 * size, tp, sequence_parallel=sp, names=[f"{name}.mlp.up"])
        self.down = RowParallelLinear(4 * size, size, tp, sequence_parallel=sp, name=f"{name}.mlp.down")

    def forward(self, x: Tensor, batch: LocalBatch) -> Tensor:
        qkv = self.qkv(self.norm1(x))
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in qkv.chunk(3, -1))
        x = x + self.out(self.attention(q, k, v, batch.sequence).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def layers(spec: ModelSpec, ctx: ParallelContext, attention: Callable[[], ContextParallelAttention]) -> list[LayerDef]:
    """The pipeline, in order. `decoder` layers are what the stages share out."""

    def block(index: int) -> Callable[[], nn.Module]:
        return lambda: Block(spec, index, ctx, attention())

    return [
        LayerDef("embedding", lambda: Embeddings(spec, ctx)),
        *(LayerDef("decoder", block(i)) for i in range(spec.num_layers)),
        LayerDef("norm", lambda: LayerNorm(spec.hidden_size, "ln_f", ctx)),
        LayerDef("head", lambda: Head(spec, ctx)),
    ]


def main(path: str, *overrides: str) -> list[float]:
    """Train and return the losses."""
    config = hybrid5d.load_config(path, overrides)
    plan = build_plan(config, int(os.environ.get("WORLD_SIZE", "1")))
    engine = hybrid5d.initialize(plan, layers=layers)
    losses = []
    for batch in loader_from_plan(plan, engine.ctx.dp.rank):
        result = engine.train_batch(batch)
        losses.append(result.loss)
        if engine.ctx.rank == 0:
            print(f"step {result.step} loss {result.loss:.4f} grad norm {result.grad_norm:.3f}", flush=True)
    return losses


if __name__ == "__main__":
    main(*[word for word in sys.argv[1:] if not word.startswith("--local")])
