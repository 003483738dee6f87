"""How a local parameter is cut, and which ranks hold the same values.

Every parameter of our layers carries `param.shard`. Initialisation, loading, checkpoints, norms, the sums of partial
gradients, export and the tests read it, so no other code knows how a weight is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybrid5d.parallel.context import Axis
from hybrid5d.plan.cut import Cut


@dataclass(frozen=True)
class Piece:
    """A run of one named tensor (of a Hugging Face folder, say) inside a local parameter.

    Attributes:
        name: e.g. `model.layers.3.self_attn.q_proj.weight`; empty in a layer that was given none.
        full_shape: shape of the whole tensor (vocabulary not padded).
        cut: the run held here.
        offset: where it starts in the local parameter along the cut's dimension. Rows of the local parameter that no
            piece covers are padding: kept at zero and out of softmax, gradients and export.
    """

    name: str
    full_shape: tuple[int, ...]
    cut: Cut
    offset: int = 0

    @property
    def length(self) -> int:
        return self.cut.length

    def local_view(self, param: Tensor) -> Tensor:
        """The part of a local tensor (parameter, gradient, moment) that this piece covers; a view."""
        return param if self.cut.dim is None else param.narrow(self.cut.dim, self.offset, self.length)

    def of(self, full: Tensor) -> Tensor:
        """The part of the whole tensor that this piece holds; a view."""
        return full[self.cut.slices(full.shape)]


@dataclass(frozen=True)
class Shard:
    """What a rank holds of one parameter.

    Attributes:
        pieces: the named runs in it, in order; several where tensors are fused.
        axis: the ranks it is cut, or replicated, over.
        copies: how many neighbours on the axis hold the very same values: 1 where all differ, axis.size where all are
            equal, between them for kv heads fewer than tp. One of them writes it and counts it in norms.
        partial: a rank's gradient covers only part of the tokens or heads, so that it must be summed over the copies
            (see `tensor_parallel.gradients`). The ranks that share a partial gradient are those that share the values.
    """

    pieces: tuple[Piece, ...]
    axis: Axis
    copies: int = 1
    partial: bool = False

    @classmethod
    def replicated(cls, name: str, shape: Sequence[int], axis: Axis, partial: bool = False) -> Shard:
        """Of a parameter that every rank of the axis holds whole."""
        return cls((Piece(name, tuple(shape), Cut.whole(shape)),), axis, axis.size, partial)

    @property
    def is_cut(self) -> bool:
        """Whether ranks of the axis hold different values."""
        return self.copies < self.axis.size

    @property
    def replica(self) -> int:
        """This copy's number among its copies; number 0 stands for them all."""
        return self.axis.rank % self.copies

    @property
    def needs_sum(self) -> bool:
        return self.partial and self.copies > 1


def shard_of(param: Tensor) -> Shard | None:
    """The shard of a parameter; None for one that was not annotated."""
    return getattr(param, "shard", None)


def pieces_of(param: Tensor) -> tuple[Piece, ...]:
    """The pieces of a parameter; empty for one that was not annotated."""
    shard = shard_of(param)
    return () if shard is None else shard.pieces


def fill_pieces(module: nn.Module, source: Callable[[Piece], Tensor]) -> None:
    """Write each piece's part of `source(piece)`, its whole tensor; rows without a piece (padding) become zero."""
    with torch.no_grad():
        for param in module.parameters():
            if pieces_of(param):
                param.zero_()
            for piece in pieces_of(param):
                piece.local_view(param).copy_(piece.of(source(piece)))
