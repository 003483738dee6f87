"""The decoder of the Llama, Mistral, Qwen2 and Qwen3 families, cut over tp (and its sequence over tp and cp).

Legend: b batch, s the rank's sequence (S/cp), H hidden, q / kv query and key-value heads, d head size, n = tp size.
With sequence parallelism the residual stream is [b, s/n, H] and norms see only their shard.
Every layer is called as `layer(x, batch)`; `batch` is the rank's LocalBatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from hybrid5d.context_parallel import ContextParallelAttention
from hybrid5d.hf.spec import ModelSpec
from hybrid5d.models.batch import LocalBatch
from hybrid5d.models.ops import apply_rotary, rms_norm, swiglu
from hybrid5d.models.rope import rope_frequencies, rope_tables
from hybrid5d.parallel.collectives import enter_tp
from hybrid5d.parallel.context import Axis, ParallelContext
from hybrid5d.parallel.pieces import Piece
from hybrid5d.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    annotate,
    column_linear,
    even_slice,
    replicated_piece,
)
from hybrid5d.tensor_parallel.loss import VocabShard, linear_cross_entropy, linear_logprobs

EMBEDDING = "model.embed_tokens"
AttentionFactory = Callable[[], ContextParallelAttention]


@dataclass(frozen=True)
class LayerDef:
    """One element of the pipeline: how to build it, what it is, and the weight it shares.

    Attributes:
        kind: `decoder` layers are counted by the stage split; the embedding goes first, norm and head last.
        tied: layers with the same non-empty key share one module (and its weight) wherever they sit.
        call: how to call a shared module in this place; None = its forward.
    """

    kind: Literal["embedding", "decoder", "norm", "head"]
    build: Callable[[], nn.Module]
    tied: str = ""
    call: Callable[[nn.Module, Tensor, LocalBatch], Any] | None = None


class RMSNorm(nn.Module):
    """RMS norm of the last dimension; replicated weight, partial gradient where it sees only some tokens or heads."""

    def __init__(self, size: int, eps: float, name: str, axis: Axis, *, partial: bool):
        super().__init__()
        self.eps = eps
        weight = nn.Parameter(torch.ones(size))
        self.weight = annotate(weight, [replicated_piece(name, (size,), axis)], sharded=False, partial=partial)

    def forward(self, x: Tensor, batch: LocalBatch | None = None) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def kv_head_slice(num_kv_heads: int, axis: Axis) -> tuple[int, int, int, int]:
    """Which kv heads a tp rank holds: (first, past the last, replica number, replicas).

    Heads are cut evenly where tp divides them; where tp is a multiple of them each head is held by tp/heads neighbours.

    Raises:
        ValueError: neither divides the other.
    """
    if num_kv_heads % axis.size == 0:
        start, stop = even_slice(num_kv_heads, axis, "num_key_value_heads")
        return start, stop, 0, 1
    if axis.size % num_kv_heads:
        raise ValueError(f"num_key_value_heads={num_kv_heads} and tensor-parallel size {axis.size}: neither divides")
    copies = axis.size // num_kv_heads
    head = axis.rank // copies
    return head, head + 1, axis.rank % copies, copies


class QKVProjection(nn.Module):
    """Query, key and value projections fused and cut by heads: [b, s, H] -> q [b,s,q/n,d], k, v [b,s,kv/n,d].

    kv heads fewer than tp are replicated over neighbouring ranks: their weights then form a parameter of their own,
    whose gradients are summed over the sharing ranks once a step and whose norm only the first of them counts.
    """

    def __init__(self, spec: ModelSpec, prefix: str, axis: Axis, *, sequence_parallel: bool):
        super().__init__()
        self.axis, self.sequence_parallel, self.head_dim = axis, sequence_parallel, spec.head_dim
        d, hidden = spec.head_dim, spec.hidden_size
        q = even_slice(spec.num_attention_heads, axis, "num_attention_heads")
        *kv, replica, copies = kv_head_slice(spec.num_key_value_heads, axis)
        self.num_q, self.num_kv = q[1] - q[0], kv[1] - kv[0]

        def runs(suffix: str, columns: tuple[int, ...]) -> tuple[list[Piece], list[Piece]]:
            q_full, kv_full = spec.num_attention_heads * d, spec.num_key_value_heads * d
            q_name = f"{prefix}.q_proj.{suffix}"
            query = [Piece(q_name, (q_full, *columns), 0, q[0] * d, q[1] * d)]
            rows, keys = kv[1] * d - kv[0] * d, []
            for i, name in enumerate(("k_proj", "v_proj")):
                full = (kv_full, *columns)
                name = f"{prefix}.{name}.{suffix}"
                keys.append(Piece(name, full, 0, kv[0] * d, kv[1] * d, i * rows, replica, copies))
            return query, keys

        self.weight = self._parameters_for(runs("weight", (hidden,)), copies, (hidden,))
        self.bias = self._parameters_for(runs("bias", ()), copies, ()) if spec.attention_bias else None

    @staticmethod
    def _parameters_for(
        runs: tuple[list[Piece], list[Piece]], copies: int, columns: tuple[int, ...]
    ) -> nn.ParameterList:
        query, keys = runs
        q_rows, kv_rows = query[0].length, sum(p.length for p in keys)
        if copies == 1:
            shifted = [Piece(p.name, p.full_shape, 0, p.start, p.stop, p.offset + q_rows) for p in keys]
            fused = nn.Parameter(torch.zeros(q_rows + kv_rows, *columns))
            return nn.ParameterList([annotate(fused, query + shifted, sharded=True)])
        q_param = annotate(nn.Parameter(torch.zeros(q_rows, *columns)), query, sharded=True)
        kv_param = annotate(nn.Parameter(torch.zeros(kv_rows, *columns)), keys, sharded=True, partial=True)
        return nn.ParameterList([q_param, kv_param])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        def whole(params: nn.ParameterList) -> Tensor:
            return params[0] if len(params) == 1 else torch.cat(tuple(params))

        bias = None if self.bias is None else whole(self.bias)
        qkv = column_linear(x, whole(self.weight), bias, self.axis, self.sequence_parallel)
        heads = qkv.view(*qkv.shape[:2], -1, self.head_dim)
        q, k, v = heads.split((self.num_q, self.num_kv, self.num_kv), 2)
        return q, k, v


class SelfAttention(nn.Module):
    """x [b, s, H] ([b, s/n, H] with SP) -> the same shape; heads over tp, sequence over cp inside `attend`."""

    def __init__(self, spec: ModelSpec, index: int, ctx: ParallelContext, attend: ContextParallelAttention):
        super().__init__()
        prefix, tp, sp = f"model.layers.{index}.self_attn", ctx.tp, ctx.sequence_parallel
        self.qkv = QKVProjection(spec, prefix, tp, sequence_parallel=sp)
        out = spec.num_attention_heads * spec.head_dim
        self.out = RowParallelLinear(
            out, spec.hidden_size, f"{prefix}.o_proj", tp, bias=spec.attention_out_bias, sequence_parallel=sp
        )
        self.q_norm = self.k_norm = None
        if spec.qk_norm:  # each rank sees only its heads, so these gradients are partial with or without SP
            self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, f"{prefix}.q_norm.weight", tp, partial=True)
            self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, f"{prefix}.k_norm.weight", tp, partial=True)
        self.attend = attend
        self.window = spec.window(index)
        self.recompute_core = False
        self._rope = rope_frequencies(spec.rope, spec.head_dim, spec.max_position_embeddings)

    def forward(self, x: Tensor, batch: LocalBatch) -> Tensor:
        q, k, v = self.qkv(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = batch.shared(("rope", x.dtype), lambda: rope_tables(*self._rope, batch.position_ids, x.dtype))
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        if self.recompute_core and torch.is_grad_enabled():
            mixed = torch.utils.checkpoint.checkpoint(
                self._core, q, k, v, batch, use_reentrant=False, preserve_rng_state=False
            )
        else:
            mixed = self._core(q, k, v, batch)
        return self.out(mixed.reshape(*mixed.shape[:2], -1))

    def _core(self, q: Tensor, k: Tensor, v: Tensor, batch: LocalBatch) -> Tensor:
        return self.attend(q, k, v, batch.sequence, self.window)


class FeedForward(nn.Module):
    """SwiGLU: gate and up by columns (one matrix), down by rows."""

    def __init__(self, spec: ModelSpec, index: int, ctx: ParallelContext):
        super().__init__()
        prefix, sp, size = f"model.layers.{index}.mlp", ctx.sequence_parallel, spec.intermediate_size
        names = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
        self.gate_up = ColumnParallelLinear(
            spec.hidden_size, (size, size), names, ctx.tp, bias=spec.mlp_bias, sequence_parallel=sp
        )
        self.down = RowParallelLinear(
            size, spec.hidden_size, f"{prefix}.down_proj", ctx.tp, bias=spec.mlp_bias, sequence_parallel=sp
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x)))


class DecoderLayer(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then + feed-forward(norm(.))."""

    def __init__(self, spec: ModelSpec, index: int, ctx: ParallelContext, attend: ContextParallelAttention):
        super().__init__()
        prefix, eps, sp = f"model.layers.{index}", spec.rms_norm_eps, ctx.sequence_parallel
        size, tp = spec.hidden_size, ctx.tp
        self.input_norm = RMSNorm(size, eps, f"{prefix}.input_layernorm.weight", tp, partial=sp)
        self.attention = SelfAttention(spec, index, ctx, attend)
        self.post_norm = RMSNorm(size, eps, f"{prefix}.post_attention_layernorm.weight", tp, partial=sp)
        self.mlp = FeedForward(spec, index, ctx)

    def forward(self, x: Tensor, batch: LocalBatch) -> Tensor:
        x = x + self.attention(self.input_norm(x), batch)
        return x + self.mlp(self.post_norm(x))


class Embedding(VocabParallelEmbedding):
    """First layer of the pipeline; its matrix may be the head's as well."""

    def forward(self, x: Tensor | None, batch: LocalBatch) -> Tensor:  # type: ignore[override]
        return super().forward(batch.input_ids)


def head_forward(
    weight: Tensor,
    vocab_start: int,
    x: Tensor,
    batch: LocalBatch,
    spec: ModelSpec,
    ctx: ParallelContext,
) -> Any:
    """x [b, s, H] ([b, s/n, H] with SP) against weight [V/n, H]; `batch.head` says what for.

    `loss`: fp32 sum of the cross entropy over this rank's valid tokens (equal on tp ranks).
    `logprobs`: (log-probability of each label, entropy), fp32 [b, s] each, no gradient.
    """
    hidden = enter_tp(x, ctx.tp, ctx.sequence_parallel).reshape(-1, spec.hidden_size)
    shard = VocabShard(ctx.tp, vocab_start, spec.vocab_size)
    labels = batch.labels.reshape(-1)
    if batch.head == "loss":
        return linear_cross_entropy(hidden, weight, labels, shard)
    logprobs, entropy = linear_logprobs(hidden, weight, labels, shard)
    return logprobs.view_as(batch.labels), entropy.view_as(batch.labels)


class Head(nn.Module):
    """Last layer: vocabulary projection with its loss fused. Untied models own the matrix here."""

    def __init__(self, spec: ModelSpec, ctx: ParallelContext):
        super().__init__()
        table = VocabParallelEmbedding(spec.vocab_size, spec.hidden_size, "lm_head", ctx.tp)
        self.weight, self.vocab_start = table.weight, table.vocab_start
        self.spec, self.ctx = spec, ctx

    def forward(self, x: Tensor, batch: LocalBatch) -> Any:
        return head_forward(self.weight, self.vocab_start, x, batch, self.spec, self.ctx)


def decoder_layers(
    spec: ModelSpec,
    ctx: ParallelContext,
    attention: AttentionFactory,
    selective_recompute: bool = False,
) -> list[LayerDef]:
    """The whole model in pipeline order: embedding, decoder layers, final norm, head."""
    sp = ctx.sequence_parallel

    def embedding() -> nn.Module:
        pad = spec.pad_token_id  # HF's embedding gives this id no gradient; negative ids count from the end
        pad = pad + spec.vocab_size if pad is not None and pad < 0 else pad
        return Embedding(spec.vocab_size, spec.hidden_size, EMBEDDING, ctx.tp, sequence_parallel=sp, padding_idx=pad)

    def block(index: int) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            layer = DecoderLayer(spec, index, ctx, attention())
            layer.attention.recompute_core = selective_recompute
            return layer

        return build

    def tied_head(table: nn.Module, x: Tensor, batch: LocalBatch) -> Any:
        assert isinstance(table, Embedding)
        return head_forward(table.weight, table.vocab_start, x, batch, spec, ctx)

    tied = spec.tie_word_embeddings
    key = "embed_tokens" if tied else ""
    layers = [LayerDef("embedding", embedding, key)]
    layers += [LayerDef("decoder", block(i)) for i in range(spec.num_layers)]
    layers.append(
        LayerDef("norm", lambda: RMSNorm(spec.hidden_size, spec.rms_norm_eps, "model.norm.weight", ctx.tp, partial=sp))
    )
    layers.append(
        LayerDef("head", embedding, key, tied_head) if tied else LayerDef("head", lambda: Head(spec, ctx))
    )
    return layers
