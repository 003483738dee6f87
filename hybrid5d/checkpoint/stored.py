"""Runs of stored tensors -> any other cut of them: what overlaps is copied."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from hybrid5d.checkpoint.manifest import StoredTensor
from hybrid5d.checkpoint.start_weights import TensorFiles
from hybrid5d.parallel.shard import Piece


def fill_from_runs(
    target: Tensor, piece: Piece, stored: StoredTensor, kind: str, folder: Path, reader: TensorFiles
) -> None:
    """Copy a piece of a stored tensor into `target`, reading only what overlaps with each run."""
    for run in stored.runs[kind]:
        common = run.cut.overlap(piece.cut, stored.shape)
        if common is not None:
            in_run, in_piece = common
            target[in_piece].copy_(reader.read(folder / run.file, run.key(piece.name, kind), in_run))
