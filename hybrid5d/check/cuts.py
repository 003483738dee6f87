"""Layouts that a check trains: the run's own where the ranks suffice, else each axis at a small degree. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations

from hybrid5d.plan.layout import ParallelLayout

AXES = ("dp", "pp", "cp", "sp", "tp")  # the order in which they are tried at 1: the likeliest to be innocent first


@dataclass(frozen=True)
class Degrees:
    """A layout with what else cuts: `sp` rides on tp; `ulysses` is the degree that exchanges heads (1: none does)."""

    layout: ParallelLayout
    sp: bool = False
    ulysses: int = 1

    @property
    def world(self) -> int:
        """Ranks."""
        return self.layout.world_size

    @property
    def axes(self) -> tuple[str, ...]:
        """What is cut, in the order of AXES."""
        return tuple(a for a in AXES if (self.sp if a == "sp" else getattr(self.layout, a) > 1))

    def without(self, axes: Iterable[str]) -> Degrees:
        """The same with these axes at 1; sp ends with tp."""
        gone = set(axes)
        layout = replace(self.layout, **dict.fromkeys(gone - {"sp"}, 1))
        return Degrees(layout, self.sp and not gone & {"sp", "tp"}, 1 if "cp" in gone else self.ulysses)

    def __str__(self) -> str:
        degrees = (("tp", self.layout.tp), ("cp", self.layout.cp), ("dp", self.layout.dp), ("pp", self.layout.pp))
        sp = " + sp" if self.sp else ""
        return " x ".join(f"{a} {n}{sp if a == 'tp' else ''}" for a, n in degrees if n > 1) or "one rank"


def project(cut: Degrees) -> Degrees:
    """Every axis at 2; a cp that exchanges heads inside and runs a ring outside at 4."""
    axes = {a: min(2, getattr(cut.layout, a)) for a in ("tp", "pp", "dp")}
    cp, ulysses = cut.layout.cp, cut.ulysses
    if 1 < ulysses < cp:
        return Degrees(ParallelLayout(cp=4, **axes), cut.sp, 2)
    return Degrees(ParallelLayout(cp=min(2, cp), **axes), cut.sp, min(2, ulysses))


def parts(cut: Degrees, ranks: int) -> list[Degrees]:
    """The cut where `ranks` suffice; else the cuts with as many of its axes as they allow, each axis in one at least.

    Raises:
        ValueError: an axis alone needs more; its text names the axis and the ranks.
    """
    if cut.world <= ranks:
        return [cut]
    whole = [a for a in cut.axes if a != "sp"]
    if missing := [a for a in whole if getattr(cut.layout, a) > ranks]:
        raise ValueError(f"{missing[0]} needs {getattr(cut.layout, missing[0])} ranks")
    result: list[Degrees] = []
    for count in range(len(whole) - 1, 0, -1):
        for kept in combinations(whole, count):
            part = cut.without(set(whole) - set(kept))
            if part.world <= ranks and not any(set(kept) <= set(f.axes) for f in result):
                result.append(part)
    return result
