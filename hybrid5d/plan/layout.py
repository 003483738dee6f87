"""Rank arithmetic: the one place that knows which rank sits where.

Order is Megatron's and RLinf's `tp-cp-dp-pp`, tp fastest: `rank = tp + TP*(cp + CP*(dp + DP*pp))`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import product

AXES = ("pp", "dp", "cp", "tp")  # slowest to fastest
RANK_ORDER = "tp-cp-dp-pp"


@dataclass(frozen=True)
class Coordinate:
    """Position of a rank on each axis."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class ParallelLayout:
    """Degrees of the four mesh axes. Sequence parallelism rides the tp axis and adds no ranks.

    Raises:
        ValueError: a degree below 1.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for f in fields(self):
            degree = getattr(self, f.name)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise ValueError(f"{f.name}={degree!r}: a parallel degree is an integer of at least 1")

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def rank(self, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Global rank of a coordinate."""
        for axis, index in zip(AXES, (pp, dp, cp, tp)):
            if not 0 <= index < getattr(self, axis):
                raise ValueError(f"{axis} index {index} outside 0..{getattr(self, axis) - 1}")
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def coordinate(self, rank: int) -> Coordinate:
        """Coordinate of a global rank."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} outside 0..{self.world_size - 1}")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinate(pp=pp, dp=dp, cp=cp, tp=tp)

    def groups(self, *axes: str) -> list[list[int]]:
        """All groups of ranks that differ only on `axes`, in order of their lowest rank; ranks ascending inside.

        `groups("tp")` are the tensor-parallel groups, `groups("dp", "cp")` the ones that share a shard of weights.
        """
        unknown = set(axes) - set(AXES)
        if unknown or not axes:
            raise ValueError(f"axes {axes}: name some of {AXES}")
        fixed = [a for a in AXES if a not in axes]
        moving = [a for a in AXES if a in axes]
        result = []
        for outer in product(*(range(getattr(self, a)) for a in fixed)):
            base = dict(zip(fixed, outer))
            members = [
                self.rank(**base, **dict(zip(moving, inner)))
                for inner in product(*(range(getattr(self, a)) for a in moving))
            ]
            result.append(sorted(members))
        return sorted(result)

    def group_of(self, rank: int, *axes: str) -> list[int]:
        """The group of `groups(*axes)` that holds `rank`."""
        at = self.coordinate(rank)
        moving = [a for a in AXES if a in axes]
        fixed = {a: getattr(at, a) for a in AXES if a not in axes}
        return sorted(
            self.rank(**fixed, **dict(zip(moving, inner)))
            for inner in product(*(range(getattr(self, a)) for a in moving))
        )
