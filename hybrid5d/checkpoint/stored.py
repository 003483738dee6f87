"""Runs of stored tensors -> any other cut of them: boxes are intersected and the overlaps copied."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from hybrid5d.checkpoint.manifest import Run, StoredTensor
from hybrid5d.checkpoint.start_weights import TensorFiles, piece_box
from hybrid5d.parallel.pieces import Piece

Box = tuple[tuple[int, int], ...]


def overlap(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes; None where it is empty."""
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return None if any(lo >= hi for lo, hi in both) else both


def _inside(box: Box, origin: Box) -> tuple[slice, ...]:
    return tuple(slice(lo - first, hi - first) for (lo, hi), (first, _) in zip(box, origin))


def fill_from_runs(
    target: Tensor, piece: Piece, stored: StoredTensor, kind: str, folder: Path, reader: TensorFiles
) -> None:
    """Copy a piece of a stored tensor into `target`, reading only what overlaps with each run."""
    wanted: Box = tuple((s.start, s.stop) for s in piece_box(piece))
    runs: tuple[Run, ...] = stored.runs[kind]
    for run in runs:
        box = run.box(stored.shape)
        common = overlap(wanted, box)
        if common is not None:
            part = reader.read(folder / run.file, run.key(piece.name, kind), _inside(common, box))
            target[_inside(common, wanted)].copy_(part)
