"""A run of a tensor along one dimension: how weights are cut, stored and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Cut:
    """Indices start..stop of dimension `dim` of a tensor; dim None = the whole tensor (0..shape[0]).

    Example: Cut(0, 8, 16) of a [32, 10] matrix is its rows 8 to 15.
    """

    dim: int | None
    start: int
    stop: int

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Cut:
        return cls(None, 0, shape[0])

    @classmethod
    def even(cls, dim: int, total: int, parts: int, index: int, what: str = "size") -> Cut:
        """Part `index` of `parts` equal runs of `total`.

        Raises:
            ValueError: `parts` does not divide `total`; names `what`.
        """
        if total % parts:
            raise ValueError(f"{what}={total} is not a multiple of the tensor-parallel size {parts}")
        return cls(dim, total // parts * index, total // parts * (index + 1))

    @property
    def length(self) -> int:
        return self.stop - self.start

    def box(self, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """(first, past the last) index of each dimension of a tensor of that shape."""
        return tuple((self.start, self.stop) if d == self.dim else (0, n) for d, n in enumerate(shape))

    def slices(self, shape: Sequence[int]) -> Slices:
        """The run as one slice per dimension."""
        return tuple(slice(*bounds) for bounds in self.box(shape))

    def overlap(self, other: Cut, shape: Sequence[int]) -> tuple[Slices, Slices] | None:
        """The elements that two runs of one tensor share: as slices of this run and of the other; None = none."""
        mine, theirs = self.box(shape), other.box(shape)
        common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(mine, theirs)]
        if any(lo >= hi for lo, hi in common):
            return None

        def inside(box: tuple[tuple[int, int], ...]) -> Slices:
            return tuple(slice(lo - first, hi - first) for (lo, hi), (first, _) in zip(common, box))

        return inside(mine), inside(theirs)
