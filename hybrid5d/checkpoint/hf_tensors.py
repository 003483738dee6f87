"""The weights of a live model as whole tensors under their Hugging Face names, bucket by bucket, from any layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod

import torch
from torch import Tensor, nn

from hybrid5d.checkpoint.manifest import WEIGHT
from hybrid5d.checkpoint.safetensors_writer import tensor_bytes
from hybrid5d.checkpoint.shards import saved_parameters
from hybrid5d.checkpoint.state import TrainState
from hybrid5d.parallel.agree import gather_objects, world_axis
from hybrid5d.parallel.collectives import all_reduce
from hybrid5d.parallel.shard import Piece, pieces_of

BUCKET_BYTES = 256 * 2**20
Shapes = Mapping[str, tuple[int, ...]]


def ordered(names: Iterable[str]) -> list[str]:
    """Layer 2 before layer 10."""

    def place(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]

    return sorted(names, key=place)


def buckets(shapes: Shapes, dtype: torch.dtype, max_bytes: int) -> list[list[str]]:
    """Runs of names of at most `max_bytes` each; a larger tensor is a run of its own."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, shape in shapes.items():
        size = tensor_bytes(dtype, shape)
        if groups[-1] and used + size > max_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups


class HfTensors:
    """Whole tensors of a live model, on every rank.

    Attributes:
        shapes: of every tensor by name, in the order in which they come.
    """

    def __init__(self, state: TrainState):
        """Collective over the world."""
        self._state = state
        self._held: dict[str, list[tuple[nn.Parameter, Piece]]] = {}  # what this rank contributes to a name
        for param in saved_parameters(state.module):
            for piece in pieces_of(param):
                if piece.length:
                    self._held.setdefault(piece.name, []).append((param, piece))
        pieces = [piece for parts in self._held.values() for _, piece in parts]
        mine = [(p.name, p.full_shape, prod(b - a for a, b in p.cut.box(p.full_shape))) for p in pieces]
        found: dict[str, tuple[int, ...]] = {}
        covered: dict[str, int] = {}
        for name, shape, size in (x for rank in gather_objects(mine, state.ctx.pp_tp) for x in rank):
            found[name] = shape
            covered[name] = covered.get(name, 0) + size
        gaps = [n for n, shape in found.items() if covered[n] != prod(shape)]
        assert not gaps, f"parts of {gaps[:3]} are held by no rank, or by two"
        self.shapes: Shapes = {name: found[name] for name in ordered(found)}
        self._left = Counter(id(param) for parts in self._held.values() for param, _ in parts)
        self._whole: dict[int, Tensor | None] = {}

    def stream(
        self, dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES, before: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of every tensor in `dtype`; every rank must draw all. Collective over the world.

        A bucket is summed over the world as integers, each element nonzero on the one rank that holds it: exact.

        Args:
            before: called before each bucket; what it raises, on all ranks or on none, ends the stream.
        """
        for names in buckets(self.shapes, dtype, bucket_bytes):
            before()
            yield from self._bucket(names, dtype)

    def _bucket(self, names: list[str], dtype: torch.dtype) -> list[tuple[str, Tensor]]:
        sizes = [prod(self.shapes[name]) for name in names]
        device = next(self._state.module.parameters()).device
        flat = torch.zeros(sum(sizes) + sum(sizes) % 2, dtype=dtype, device=device)  # whole int32
        tensors = [part.view(self.shapes[n]) for n, part in zip(names, flat[: sum(sizes)].split(sizes))]
        with torch.no_grad():
            for name, tensor in zip(names, tensors):
                for param, piece in self._held.get(name, ()):
                    self._fill(tensor, param, piece)
        summed = all_reduce(flat.view(torch.int32), world_axis()).wait().view(dtype)
        parts = summed[: sum(sizes)].split(sizes)
        return [(name, part.view(self.shapes[name])) for name, part in zip(names, parts)]

    def _fill(self, tensor: Tensor, param: nn.Parameter, piece: Piece) -> None:
        """This rank's part; a parameter of several pieces is gathered over dp x cp once."""
        key = id(param)
        if key not in self._whole:
            self._whole[key] = self._state.optimizer.gather(param, WEIGHT, 0)
        whole = self._whole[key]
        if whole is not None:
            piece.of(tensor).copy_(piece.local_view(whole))
        self._left[key] -= 1
        if not self._left[key]:
            del self._whole[key]
