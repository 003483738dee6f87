"""The decoder of the Llama, Mistral, Qwen2 and Qwen3 families, cut over tp (and its sequence over tp and cp).

Legend: b batch, s the rank's sequence (S/cp), H hidden, q / kv query and key-value heads, d head size, n = tp size.
With sequence parallelism the residual stream is [b, s/n, H] and norms see only their shard.
Every layer is called as `layer(x, batch)`; `batch` is the rank's LocalBatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from hybrid5d.context_parallel import ContextParallelAttention
from hybrid5d.hf.folder import VALUE_HEAD
from hybrid5d.hf.spec import ModelSpec
from hybrid5d.models.batch import LocalBatch
from hybrid5d.models.ops import apply_rotary, rms_norm, swiglu
from hybrid5d.models.rope import rope_frequencies, rope_tables
from hybrid5d.parallel.context import Axis, ParallelContext
from hybrid5d.plan.tensors import kv_cut
from hybrid5d.tensor_parallel import (
    ColumnParallelLinear,
    HeadOptions,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabShard,
    column_linear,
    linear_logprobs,
    linear_token_loss,
    linear_value_loss,
    linear_values,
    replicated,
)

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
        self.weight = replicated(nn.Parameter(torch.ones(size)), axis, name, partial=partial)

    def forward(self, x: Tensor, batch: LocalBatch | None = None) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class QKVProjection(nn.Module):
    """Query, key and value projections cut by heads: [b, s, H] -> q [b, s, q/n, d], k, v [b, s, kv/n, d].

    One matrix; two where kv heads fewer than tp are shared by neighbouring ranks, as only those of the second are
    copies. Both read the same gathered input.
    """

    def __init__(self, spec: ModelSpec, prefix: str, axis: Axis, *, sequence_parallel: bool):
        super().__init__()
        self.axis, self.sequence_parallel, self.head_dim = axis, sequence_parallel, spec.head_dim
        heads, kv_heads = spec.num_attention_heads, spec.num_key_value_heads
        if heads % axis.size:
            raise ValueError(f"num_attention_heads={heads} is not a multiple of the tensor-parallel size {axis.size}")
        kv = kv_cut(kv_heads, axis.size)
        fused = (("q", "k", "v"),) if kv.copies == 1 else (("q",), ("k", "v"))
        total = {"q": heads, "k": kv_heads, "v": kv_heads}
        held = {"q": heads // axis.size, "k": kv.per_rank, "v": kv.per_rank}
        self.splits = [tuple(held[x] for x in part) for part in fused]
        parts = []
        for part in fused:
            sizes, names = [total[x] * spec.head_dim for x in part], [f"{prefix}.{x}_proj" for x in part]
            shared = 1 if "q" in part else kv.copies
            bias = spec.attention_bias
            parts.append(ColumnParallelLinear(spec.hidden_size, sizes, axis, bias, sequence_parallel, names, shared))
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layers = cast(list[ColumnParallelLinear], list(self.parts))
        outs = column_linear(x, [(p.weight, p.bias) for p in layers], self.axis, self.sequence_parallel)
        heads = (y.unflatten(-1, (-1, self.head_dim)).split(n, 2) for y, n in zip(outs, self.splits))
        q, k, v = (h for part in heads for h in part)
        return q, k, v


class SelfAttention(nn.Module):
    """x [b, s, H] ([b, s/n, H] with SP) -> the same shape; heads over tp, sequence over cp inside `attend`."""

    def __init__(self, spec: ModelSpec, index: int, ctx: ParallelContext, attend: ContextParallelAttention):
        super().__init__()
        prefix, tp, sp = f"model.layers.{index}.self_attn", ctx.tp, ctx.sequence_parallel
        self.qkv = QKVProjection(spec, prefix, tp, sequence_parallel=sp)
        out = spec.num_attention_heads * spec.head_dim
        self.out = RowParallelLinear(out, spec.hidden_size, tp, spec.attention_out_bias, sp, f"{prefix}.o_proj")
        self.q_norm = self.k_norm = None
        if spec.qk_norm:  # each rank sees only its heads, so these gradients are partial with or without SP
            self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, f"{prefix}.q_norm.weight", tp, partial=True)
            self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, f"{prefix}.k_norm.weight", tp, partial=True)
        self.attend = attend
        self.window = spec.window(index)
        self.recompute_core = False
        self.rope = rope_frequencies(spec.rope, spec.head_dim, spec.max_position_embeddings)
        self._frequencies: Tensor | None = None  # on the device; a buffer would be cast to 16 bits with the module

    def forward(self, x: Tensor, batch: LocalBatch) -> Tensor:
        q, k, v = self.qkv(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = batch.shared(("rope", x.dtype), lambda: self._rope_tables(batch.position_ids, x.dtype))
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        if self.recompute_core and torch.is_grad_enabled():
            mixed = torch.utils.checkpoint.checkpoint(
                self._core, q, k, v, batch, use_reentrant=False, preserve_rng_state=False
            )
        else:
            mixed = self._core(q, k, v, batch)
        return self.out(mixed.reshape(*mixed.shape[:2], -1))

    def _rope_tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        inv, factor = self.rope
        if self._frequencies is None or self._frequencies.device != positions.device:
            self._frequencies = inv.to(positions.device)
        return rope_tables(self._frequencies, factor, positions, dtype)

    def _core(self, q: Tensor, k: Tensor, v: Tensor, batch: LocalBatch) -> Tensor:
        return self.attend(q, k, v, batch.sequence, self.window)


class FeedForward(nn.Module):
    """SwiGLU: gate and up by columns (one matrix), down by rows."""

    def __init__(self, spec: ModelSpec, index: int, ctx: ParallelContext):
        super().__init__()
        prefix, sp, size = f"model.layers.{index}.mlp", ctx.sequence_parallel, spec.intermediate_size
        names, bias = (f"{prefix}.gate_proj", f"{prefix}.up_proj"), spec.mlp_bias
        self.gate_up = ColumnParallelLinear(spec.hidden_size, (size, size), ctx.tp, bias, sp, names)
        self.down = RowParallelLinear(size, spec.hidden_size, ctx.tp, bias, sp, f"{prefix}.down_proj")

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


def head_forward(weight: Tensor, vocab: VocabShard, x: Tensor, batch: LocalBatch, ctx: ParallelContext) -> Any:
    """x [b, s, H] ([b, s/n, H] with SP) against weight [V/n, H]; `batch.head` says what for.

    `loss`: fp32 sum of `batch.rule`'s loss, times the column `loss_weight` where there is one, over this rank's valid
    tokens (equal on tp ranks); what the rule reports goes to the batch.
    `logprobs`: (log-probability of each label, entropy), fp32 [b, s] each, no gradient.
    """
    options = HeadOptions(ctx.sequence_parallel, batch.temperature, upstream=batch.upstream)
    if batch.head == "logprobs":
        return linear_logprobs(x, weight, batch.labels, vocab, options)
    result = linear_token_loss(x, weight, batch.labels, vocab, batch.rule, batch.columns, options)
    batch.means.update(result.means)
    batch.parts.update(result.parts)
    return result.loss


class Head(nn.Module):
    """Last layer: vocabulary projection with its loss fused. Untied models own the matrix here."""

    def __init__(self, spec: ModelSpec, ctx: ParallelContext):
        super().__init__()
        table = VocabParallelEmbedding(spec.vocab_size, spec.hidden_size, ctx.tp, name="lm_head")
        self.weight, self.vocab, self.ctx = table.weight, table.vocab, ctx

    def forward(self, x: Tensor, batch: LocalBatch) -> Any:
        return head_forward(self.weight, self.vocab, x, batch, self.ctx)


class ValueHead(nn.Module):
    """Last layer of a critic: one number a token. Its weight [1, H] is whole on every rank."""

    def __init__(self, spec: ModelSpec, ctx: ParallelContext):
        super().__init__()
        self.ctx = ctx
        weight = nn.Parameter(torch.empty(1, spec.hidden_size))
        self.weight = replicated(weight, ctx.tp, VALUE_HEAD, partial=ctx.sequence_parallel)

    def forward(self, x: Tensor, batch: LocalBatch) -> Any:
        """As `head_forward`, with each token's value where that has its log-probability, and 0 for the entropy."""
        tp, sp = self.ctx.tp, self.ctx.sequence_parallel
        if batch.head == "logprobs":
            values = linear_values(x, self.weight, tp, sp)
            return values, torch.zeros_like(values)
        result = linear_value_loss(x, self.weight, batch.labels, tp, batch.rule, batch.columns, sp)
        batch.means.update(result.means)
        batch.parts.update(result.parts)
        return result.loss


def decoder_layers(
    spec: ModelSpec,
    ctx: ParallelContext,
    attention: AttentionFactory,
    selective_recompute: bool = False,
) -> list[LayerDef]:
    """The whole model in pipeline order: embedding, decoder layers, final norm, head (a critic's: `ValueHead`)."""
    sp = ctx.sequence_parallel

    def embedding() -> nn.Module:
        pad = spec.pad_token_id  # HF's embedding gives this id no gradient; negative ids count from the end
        pad = pad + spec.vocab_size if pad is not None and pad < 0 else pad
        return Embedding(spec.vocab_size, spec.hidden_size, ctx.tp, sp, pad, EMBEDDING)

    def block(index: int) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            layer = DecoderLayer(spec, index, ctx, attention())
            layer.attention.recompute_core = selective_recompute
            return layer

        return build

    def tied_head(table: nn.Module, x: Tensor, batch: LocalBatch) -> Any:
        assert isinstance(table, Embedding)
        return head_forward(table.weight, table.vocab, x, batch, ctx)

    key = "embed_tokens" if spec.tied else ""
    layers = [LayerDef("embedding", embedding, key)]
    layers += [LayerDef("decoder", block(i)) for i in range(spec.num_layers)]
    layers.append(
        LayerDef("norm", lambda: RMSNorm(spec.hidden_size, spec.rms_norm_eps, "model.norm.weight", ctx.tp, partial=sp))
    )
    head = ValueHead if spec.value_head else Head
    layers.append(LayerDef("head", embedding, key, tied_head) if key else LayerDef("head", lambda: head(spec, ctx)))
    return layers
