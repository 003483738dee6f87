"""Initial weights that do not depend on the layout: each HF tensor is drawn whole from its name's seed, then cut."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from hybrid5d.hf.folder import VALUE_HEAD
from hybrid5d.parallel.shard import Piece, fill_pieces


def name_seed(seed: int, name: str) -> int:
    """63-bit seed of a tensor: a hash of the run's seed and the tensor's name."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def initial_tensor(piece: Piece, seed: int, std: float) -> Tensor:
    """The whole HF tensor in fp32: norms 1, biases 0, matrices normal(0, std); a value head as torch's linear layer.

    RLinf's value head is torch.nn.Linear without a bias: uniform in +-1/sqrt(H).

    Raises:
        ValueError: the piece has no name, so it would share its seed with others.
    """
    if not piece.name:
        raise ValueError(f"a parameter cut from {piece.full_shape} has no name: give its layer one")
    if piece.name.endswith(".bias"):
        return torch.zeros(piece.full_shape, dtype=torch.float32)
    if len(piece.full_shape) == 1:
        return torch.ones(piece.full_shape, dtype=torch.float32)
    generator = torch.Generator().manual_seed(name_seed(seed, piece.name))
    made = torch.empty(piece.full_shape, dtype=torch.float32)
    if piece.name == VALUE_HEAD:
        bound = piece.full_shape[1] ** -0.5
        return made.uniform_(-bound, bound, generator=generator)
    return made.normal_(0.0, std, generator=generator)


def init_weights(module: nn.Module, seed: int, std: float) -> None:
    """Fill a module's parameters from the run's seed."""
    fill_pieces(module, lambda piece: initial_tensor(piece, seed, std))
