"""Which slices of which Hugging Face tensors a local parameter holds.

Every parameter of our layers carries `param.pieces`. Initialisation, loading, checkpoints, export and the tests all
read it, so no other code knows how a weight is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Piece:
    """A run of rows (or columns) of one HF tensor inside a local parameter.

    Attributes:
        name: HF tensor name, e.g. `model.layers.3.self_attn.q_proj.weight`.
        full_shape: shape of the whole HF tensor (vocabulary not padded).
        dim: dimension that is cut, or None where the whole tensor is held.
        start, stop: the run held here, in the HF tensor's units along `dim` (0 and full_shape[0] where dim is None).
        offset: where the run starts in the local parameter along `dim`. Rows of the local parameter that no piece
            covers are padding: kept at zero and out of softmax, gradients and export.
        replica, num_replicas: this copy's number among the tp ranks that hold the very same run (kv heads shared by
            several tp ranks, replicated norms); only replica 0 writes it and counts it in norms.
    """

    name: str
    full_shape: tuple[int, ...]
    dim: int | None
    start: int
    stop: int
    offset: int = 0
    replica: int = 0
    num_replicas: int = 1

    @property
    def length(self) -> int:
        return self.stop - self.start

    def local_view(self, param: torch.Tensor) -> torch.Tensor:
        """The part of a local tensor (parameter, gradient, moment) that this piece covers; a view."""
        return param if self.dim is None else param.narrow(self.dim, self.offset, self.length)

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """The part of the full HF tensor that this piece holds; a view."""
        return full if self.dim is None else full.narrow(self.dim, self.start, self.length)


def pieces_of(param: torch.Tensor) -> tuple[Piece, ...]:
    """The pieces of a parameter; empty for one that has no HF counterpart."""
    return getattr(param, "pieces", ())
