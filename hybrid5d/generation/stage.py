"""This rank's layers run over new tokens only: keys and values of earlier ones are kept.

The weights are those in training, read where they are. Sequence parallelism and cp play no part: one token a sequence
has no sequence to cut, so a rank holds its heads of whole rows, and cp ranks work on rows of their own.

Legend: N tokens of a pass, H hidden, V vocabulary, n = tp size, q and kv this rank's query and key-value heads,
g = q/kv, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid5d.errors import ConfigError, ConfigErrors
from hybrid5d.models.decoder import DecoderLayer, Embedding, Head, RMSNorm
from hybrid5d.models.ops import rms_norm
from hybrid5d.models.rope import rope_tables
from hybrid5d.parallel.collectives import all_reduce
from hybrid5d.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabShard

Gather = Callable[[Sequence[nn.Parameter]], AbstractContextManager[Any]]


def as_they_are(params: Sequence[nn.Parameter]) -> AbstractContextManager[Any]:
    """The `Gather` of parameters that are whole on every rank."""
    return nullcontext()


class Attend(Protocol):
    """Attention of a pass in one layer: keeps k and v [N, kv, d], gives what q [N, q, d] reads, [N, q*d]."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor: ...


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `models.ops.apply_rotary`, for cos and sin [N, 1, d] of which sin's first half is negative."""
    half = x.shape[-1] // 2
    return (x * cos).addcmul_(torch.cat((x[..., half:], x[..., :half]), -1), sin)


def _row_linear(x: Tensor, layer: RowParallelLinear) -> Tensor:
    y = all_reduce(F.linear(x, layer.weight), layer.axis).wait()
    return y if layer.bias is None else y.add_(layer.bias)


class _Block:
    """A decoder layer over flat tokens [N, H]."""

    def __init__(self, layer: DecoderLayer):
        self.layer, self.window = layer, layer.attention.window
        qkv = layer.attention.qkv
        self.head_dim = qkv.head_dim
        self.parts = list(zip(cast(list[ColumnParallelLinear], list(qkv.parts)), qkv.splits))

    def __call__(self, x: Tensor, index: int, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        layer, attention, mlp = self.layer, self.layer.attention, self.layer.mlp
        h = rms_norm(x, layer.input_norm.weight, layer.input_norm.eps)
        q, k, v = (
            heads
            for part, sizes in self.parts
            for heads in F.linear(h, part.weight, part.bias).view(len(x), -1, self.head_dim).split(sizes, 1)
        )
        if attention.q_norm is not None and attention.k_norm is not None:
            q = rms_norm(q, attention.q_norm.weight, attention.q_norm.eps)
            k = rms_norm(k, attention.k_norm.weight, attention.k_norm.eps)
        mixed = attend(index, _rotate(q, cos, sin), _rotate(k, cos, sin), v, self.window)
        x = x + _row_linear(mixed, attention.out)
        h = rms_norm(x, layer.post_norm.weight, layer.post_norm.eps)
        gate, up = F.linear(h, mlp.gate_up.weight, mlp.gate_up.bias).chunk(2, -1)
        return x.add_(_row_linear(F.silu(gate).mul_(up), mlp.down))


class Stage:
    """The layers of this rank's stage: embedding on the first, final norm and head on the last.

    Attributes:
        blocks: its decoder layers.
        head_dim, kv_heads, hidden: sizes on this rank.

    Raises:
        ConfigErrors: layers that are not this package's decoder.
    """

    def __init__(self, layers: Sequence[Any], gather: Gather = as_they_are):
        self.gather = gather
        self.embedding: Embedding | None = None
        self.norm: RMSNorm | None = None
        self.head: Head | Embedding | None = None
        self.blocks: list[_Block] = []
        for layer in layers:
            if isinstance(layer, DecoderLayer):
                self.blocks.append(_Block(layer))
            elif isinstance(layer, Embedding):
                self.embedding = layer
            elif isinstance(layer, RMSNorm):
                self.norm = layer
            elif isinstance(layer, Head):
                self.head = layer
            elif isinstance(layer, partial) and isinstance(layer.args[0], Embedding):
                self.head = layer.args[0]
            else:
                rule = f"generation knows this package's decoder, not {type(layer).__name__}"
                raise ConfigErrors([ConfigError("rollout.rollout_backend", "hybrid5d", rule, "use rollout files")])

    def rope(self, positions: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin [positions, 1, d] of every position; the first half of sin is negative."""
        if not self.blocks:
            empty = torch.empty(positions, 1, 0, device=device)
            return empty, empty
        inv, factor = self.blocks[0].layer.attention.rope
        at = torch.arange(positions, device=device).unsqueeze(0)
        cos, sin = (table[0] for table in rope_tables(inv, factor, at, dtype))
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def cache_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """[rows, 2, kv, columns, d]: keys, then values."""
        block = self.blocks[0]
        return rows, 2, block.parts[-1][1][-1], columns, block.head_dim

    def _units(self) -> Iterator[list[nn.Parameter]]:
        """Parameters that are needed together, in order."""
        if self.embedding is not None:
            yield [self.embedding.weight]
        yield from (list(block.layer.parameters()) for block in self.blocks)
        if self.norm is not None and self.head is not None:
            yield [self.norm.weight, self.head.weight]

    def accompany(self, *, head_only: bool = False) -> None:
        """Take part in the gathers of a pass without work: another replica's, or (`head_only`) the head's part of one
        that needs no logits. Collective over dp x cp, as every pass is where parameters are gathered.
        """
        if self.gather is not as_they_are:
            for params in list(self._units())[-1 if head_only else 0 :]:
                with self.gather(params):
                    pass

    def embed(self, ids: Tensor) -> Tensor:
        """[N] -> [N, H]; summed over tp."""
        table = self.embedding
        assert table is not None
        with self.gather([table.weight]):
            if table.axis.size == 1:
                return F.embedding(ids, table.weight)
            local, here = table.vocab.columns(ids)
            return all_reduce(F.embedding(local, table.weight).mul_(here.unsqueeze(-1)), table.axis).wait()

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """The stage's decoder layers: [N, H] -> [N, H]; two sums over tp a layer."""
        for index, block in enumerate(self.blocks):
            with self.gather(list(block.layer.parameters()) if self.gather is not as_they_are else ()):
                x = block(x, index, cos, sin, attend)
        return x

    @property
    def vocab(self) -> VocabShard:
        """The columns of the logits that this rank holds (last stage)."""
        assert self.head is not None
        return self.head.vocab

    def logits(self, x: Tensor) -> Tensor:
        """[N, H] -> this rank's real columns, fp32 [N, V/n]."""
        norm, head = self.norm, self.head
        assert norm is not None and head is not None
        with self.gather([norm.weight, head.weight]):
            return F.linear(rms_norm(x, norm.weight, norm.eps), head.weight[: head.vocab.real]).float()
