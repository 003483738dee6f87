"""Loading training checkpoints, whatever layout saved them.

Sizes and checksums are checked before anything is changed; all ranks fail together or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from hybrid5d.checkpoint import manifest as files
from hybrid5d.checkpoint.manifest import SHARE, WEIGHT, Manifest
from hybrid5d.checkpoint.shards import CUDA_RNG, RNG, shard_files
from hybrid5d.checkpoint.start_weights import TensorFiles, zero_padding
from hybrid5d.checkpoint.state import TrainState
from hybrid5d.checkpoint.stored import fill_from_runs
from hybrid5d.errors import CheckpointError, DamagedCheckpoint
from hybrid5d.files import crc32_of
from hybrid5d.parallel.agree import gather_objects, together, world_axis
from hybrid5d.parallel.shard import Piece, pieces_of


def _named_pieces(module: nn.Module) -> Iterator[tuple[nn.Parameter, Piece]]:
    for param in module.parameters():
        for piece in pieces_of(param):
            yield param, piece


def _misfits(state: TrainState, manifest: Manifest, model_names: set[str]) -> list[str]:
    """Why this model cannot go on from this checkpoint."""
    found: dict[str, None] = {}
    if manifest.optimizer["type"] != state.optimizer.name:
        found[f"its optimizer is {manifest.optimizer['type']}, this run's is {state.optimizer.name}"] = None
    for name in sorted(model_names - set(manifest.tensors))[:3]:
        found[f"it has no {name}"] = None
    for name in sorted(set(manifest.tensors) - model_names)[:3]:
        found[f"the model has no {name}, which it holds"] = None
    for param, piece in _named_pieces(state.module):
        stored = manifest.tensors.get(piece.name)
        if stored is None:
            continue
        if stored.shape != tuple(piece.full_shape):
            found[f"its {piece.name} has shape {list(stored.shape)}, the model's {list(piece.full_shape)}"] = None
        missing = [m for m in manifest.kinds if m not in stored.runs]
        if param.requires_grad and missing:
            found[f"{piece.name} was frozen and has no {missing[0]}, but is to be trained now"] = None
    return list(found)


def _check_fit(state: TrainState, folder: Path, manifest: Manifest) -> None:
    names: set[str] = set().union(*gather_objects({p.name for _, p in _named_pieces(state.module)}, world_axis()))

    def compare() -> None:
        lines = _misfits(state, manifest, names)
        if lines:
            now = files.describe_layout(state.layout())
            before = files.describe_layout(manifest.layout)
            raise CheckpointError(f"{folder} (saved by {before}) cannot be resumed by {now}: " + "; ".join(lines[:6]))

    together(world_axis(), compare)


def _restore(state: TrainState, folder: Path, manifest: Manifest) -> None:
    """Overwrite masters, weights and moments of this rank."""
    with TensorFiles() as reader, torch.no_grad():
        for param in state.module.parameters():
            pieces = pieces_of(param)
            if not pieces:
                continue
            for kind in manifest.kinds if param.requires_grad else (WEIGHT,):
                if kind != WEIGHT and not state.optimizer.holds(param, kind):
                    continue  # another dp x cp rank keeps these moments
                whole = torch.empty(state.optimizer.shape(param), dtype=torch.float32)
                zero_padding(whole, pieces)
                for piece in pieces:
                    stored = manifest.tensors[piece.name]
                    fill_from_runs(piece.local_view(whole), piece, stored, kind, folder, reader)
                state.optimizer.set(param, kind, whole)


def _restore_rng(state: TrainState, folder: Path, manifest: Manifest) -> None:
    """Random state belongs to a rank of a layout; another layout starts its own."""
    if any(manifest.layout.get(a) != getattr(state.ctx.layout, a) for a in ("pp", "dp", "cp", "tp")):
        return
    _, file = shard_files(state.ctx)
    with TensorFiles() as reader:
        found = [(RNG, reader.read(folder / file, RNG).clone(), torch.get_rng_state, torch.set_rng_state)]
        if torch.cuda.is_initialized() and reader.holds(folder / file, CUDA_RNG):  # not where a CPU wrote it
            there = reader.read(folder / file, CUDA_RNG).clone()
            found.append((CUDA_RNG, there, torch.cuda.get_rng_state, torch.cuda.set_rng_state))
    for name, saved, present, restore in found:
        if saved.dtype != torch.uint8 or saved.shape != present().shape:
            raise CheckpointError(f"{folder / file}: {name} is no state of torch's random numbers")
        restore(saved)


def load_checkpoint(state: TrainState, directory: str | Path) -> Manifest:
    """Restore weights, masters and moments from a checkpoint of any layout. Collective over the world.

    Args:
        state: what is overwritten; the step is the caller's to set.
        directory: a `checkpoints` folder (its newest), a `global_step_N` folder or its `actor` folder.

    Returns:
        The checkpoint's manifest: its `step`, and as `state` what its save was given.

    Raises:
        CheckpointError: missing or truncated files, another model or optimizer; DamagedCheckpoint: a wrong checksum;
            on all ranks, with nothing overwritten.
    """
    axis, access = world_axis(), state.optimizer
    folder = together(axis, lambda: files.whole_checkpoint(directory))
    manifest = together(axis, lambda: files.read_manifest(folder))
    hashes = gather_objects(together(axis, lambda: crc32_of(folder / files.MANIFEST)), axis)
    if others := [rank for rank, value in enumerate(hashes) if value != hashes[0]]:
        raise CheckpointError(f"{folder} is one checkpoint on rank 0 and another on rank {others[0]}. {SHARE}")
    _check_fit(state, folder, manifest)
    mine = sorted(manifest.files)[axis.rank :: axis.size]

    def check_content() -> None:
        headers = [fault for name in mine for fault in files.header_faults(folder, manifest, name)]
        if faults := headers or files.content_faults(folder, manifest, mine):
            raise CheckpointError("\n".join(faults))

    try:
        together(axis, check_content)
    except CheckpointError as exc:
        raise DamagedCheckpoint(str(exc)) from None
    access.reset(tuple(manifest.optimizer["state"]), int(manifest.optimizer["step"]))

    def restore() -> None:
        _restore_rng(state, folder, manifest)
        _restore(state, folder, manifest)

    together(axis, restore)
    access.set_loss_scaler(dict(manifest.loss_scaler))
    return manifest
