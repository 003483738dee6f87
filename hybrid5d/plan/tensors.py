"""Every tensor of a model: name, shape, layer, and how tensor parallelism cuts it. Pure.

The check of a model folder, the rules on sizes, the layers and estimates of memory read this; no other place states a
tensor's shape.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Literal

from hybrid5d.errors import ConfigError
from hybrid5d.hf.folder import EMBEDDING, HEAD, VALUE_HEAD
from hybrid5d.hf.spec import ModelSpec

MAX_TP = 4096  # nobody cuts a matrix finer; a YAML may name 2**53 heads
Kind = Literal["rows", "cols", "q_heads", "kv_heads", "vocab", "none"]


@dataclass(frozen=True)
class TensorDef:
    """One tensor under its Hugging Face name.

    Attributes:
        shape: of the whole tensor; matrices are [out, in], the vocabulary is not padded.
        layer: number of its decoder layer; None for the embedding, the final norm and the head.
        cut: over tp: `rows` and `cols` in equal runs of dimension 0 or 1; `q_heads` and `kv_heads` by heads of
            dimension 0 (kv heads fewer than tp are replicated, see `kv_cut`); `vocab` in equal runs of the rows after
            padding; `none` = whole on every rank.
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None
    cut: Kind

    def local_shape(self, spec: ModelSpec, tp: int) -> tuple[int, ...]:
        """Shape of one tp rank's part, vocabulary padding included.

        Raises:
            ValueError: tp cannot cut the key-value heads.
        """
        first, *rest = self.shape
        if self.cut == "none":
            return self.shape
        if self.cut == "cols":
            return first, rest[0] // tp
        if self.cut == "kv_heads":
            return kv_cut(spec.num_key_value_heads, tp).per_rank * spec.head_dim, *rest
        return -(-first // tp), *rest


@dataclass(frozen=True)
class HeadCut:
    """How tp ranks share heads: each holds `per_rank` neighbouring ones, `copies` neighbouring ranks hold the same."""

    per_rank: int
    copies: int

    def run(self, rank: int) -> tuple[int, int]:
        """(first head, past the last) of a tp rank."""
        start = rank // self.copies * self.per_rank
        return start, start + self.per_rank


def kv_cut(heads: int, tp: int) -> HeadCut:
    """Key-value heads over tp: even where tp divides them; where tp is a multiple of them, tp/heads ranks share a head.

    Raises:
        ValueError: neither divides the other.
    """
    if heads % tp and tp % heads:
        raise ValueError(f"num_key_value_heads={heads} and tensor-parallel size {tp}: neither divides the other")
    return HeadCut(max(heads // tp, 1), max(tp // heads, 1))


def tensors(spec: ModelSpec) -> list[TensorDef]:
    """All tensors of a model in the order of its layers; a tied head is the embedding and has no entry.

    A critic's head has width 1 and is whole on every rank.
    """
    hidden = spec.hidden_size
    result = [TensorDef(EMBEDDING, (spec.vocab_size, hidden), None, "vocab")]
    for i in range(spec.num_layers):
        result += _decoder_layer(spec, i)
    result.append(TensorDef("model.norm.weight", (hidden,), None, "none"))
    if spec.value_head:
        result.append(TensorDef(VALUE_HEAD, (1, hidden), None, "none"))
    elif not spec.tied:
        result.append(TensorDef(HEAD, (spec.vocab_size, hidden), None, "vocab"))
    return result


def _decoder_layer(spec: ModelSpec, index: int) -> list[TensorDef]:
    hidden, inner, d = spec.hidden_size, spec.intermediate_size, spec.head_dim
    q, kv = spec.num_attention_heads * d, spec.num_key_value_heads * d
    result: list[TensorDef] = []

    def add(name: str, shape: tuple[int, ...], cut: Kind) -> None:
        result.append(TensorDef(f"model.layers.{index}.{name}", shape, index, cut))

    def linear(name: str, out: int, columns: int, cut: Kind, bias: bool) -> None:
        add(f"{name}.weight", (out, columns), cut)
        if bias:  # added once, after the sum over the ranks, where the columns are cut
            add(f"{name}.bias", (out,), "none" if cut == "cols" else cut)

    add("input_layernorm.weight", (hidden,), "none")
    linear("self_attn.q_proj", q, hidden, "q_heads", spec.attention_bias)
    linear("self_attn.k_proj", kv, hidden, "kv_heads", spec.attention_bias)
    linear("self_attn.v_proj", kv, hidden, "kv_heads", spec.attention_bias)
    linear("self_attn.o_proj", hidden, q, "cols", spec.attention_out_bias)
    if spec.qk_norm:
        add("self_attn.q_norm.weight", (d,), "none")
        add("self_attn.k_norm.weight", (d,), "none")
    add("post_attention_layernorm.weight", (hidden,), "none")
    linear("mlp.gate_proj", inner, hidden, "rows", spec.mlp_bias)
    linear("mlp.up_proj", inner, hidden, "rows", spec.mlp_bias)
    linear("mlp.down_proj", hidden, inner, "cols", spec.mlp_bias)
    return result


def shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a folder of the model must hold."""
    return {t.name: t.shape for t in tensors(spec)}


def on_stage(spec: ModelSpec, stages: Sequence[int], stage: int) -> list[TensorDef]:
    """Tensors that a pipeline stage holds; `stages` counts the decoder layers of each.

    The embedding is on the first stage, final norm and head on the last; a tied matrix is on both.
    """
    first, last = sum(stages[:stage]), len(stages) - 1
    layers = range(first, first + stages[stage])

    def here(t: TensorDef) -> bool:
        if t.layer is not None:
            return t.layer in layers
        if t.name == EMBEDDING:
            return stage == 0 or (spec.tied and stage == last)
        return stage == last

    return [t for t in tensors(spec) if here(t)]


def elements_on(spec: ModelSpec, stages: Sequence[int], stage: int, tp: int) -> int:
    """Numbers (not bytes) of all weights that one tp rank of a stage holds, vocabulary padding included."""
    return sum(prod(t.local_shape(spec, tp)) for t in on_stage(spec, stages, stage))


def layer_elements(spec: ModelSpec, tp: int) -> int:
    """Numbers of all weights of one decoder layer on a tp rank."""
    return sum(prod(t.local_shape(spec, tp)) for t in _decoder_layer(spec, 0))


def layer_matmul(spec: ModelSpec) -> int:
    """Multiply-adds of a decoder layer's projections, a token."""
    return sum(prod(t.shape) for t in _decoder_layer(spec, 0) if len(t.shape) == 2)


def head_cost(spec: ModelSpec, row_length: int) -> float:
    """Work of the head and its loss in decoder layers: multiplications per token of a causal row of `row_length`."""
    attention = row_length * spec.num_attention_heads * spec.head_dim  # two products, half of each masked
    columns = 1 if spec.value_head else spec.vocab_size
    return columns * spec.hidden_size / (layer_matmul(spec) + attention)


def tp_faults(tp: int, heads: int | None, kv_heads: int | None, inner: int | None) -> list[str]:
    """What keeps `tp` from cutting a model, one clause each; sizes that are None are not asked."""
    result = []
    if heads is not None and heads % tp:
        result.append(f"num_attention_heads={heads} is not a multiple of it")
    elif kv_heads is not None and kv_heads % tp and tp % kv_heads:
        result.append(f"num_key_value_heads={kv_heads} is neither a multiple nor a divisor of it")
    if inner is not None and inner % tp:
        result.append(f"the MLP width {inner} (intermediate_size, ffn_hidden_size) is not a multiple of it")
    return result


def legal_degrees(heads: int | None, kv_heads: int | None, inner: int | None) -> list[int]:
    """Every tensor-parallel size that can cut a model of these sizes, ascending; at least one size must be known."""
    largest = min(heads or kv_heads or inner or 1, MAX_TP)
    return [tp for tp in range(1, largest + 1) if not tp_faults(tp, heads, kv_heads, inner)]


def freeze_errors(patterns: Sequence[str], names: Collection[str]) -> list[ConfigError]:
    """Why globs cannot say what is frozen: one matches no parameter, or nothing is left to train."""
    key, value = "actor.freeze_parameters", list(patterns)
    errors = []
    for pattern in patterns:
        if not any(fnmatchcase(n, pattern) for n in names):
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
            fix = f"globs are of names like {near[0]}" if near else "leave it out"
            errors.append(ConfigError(key, value, f"{pattern!r} matches none of the model's {len(names)} tensors", fix))
    if patterns and not errors and all(any(fnmatchcase(n, p) for p in patterns) for n in names):
        rule = f"all {len(names)} tensors are frozen: nothing is left to train"
        errors.append(ConfigError(key, value, rule, "freeze fewer, or evaluate with `hybrid5d eval`"))
    return errors
