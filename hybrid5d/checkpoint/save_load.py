"""Training checkpoints that any layout can load: tensors are stored by HF name and run, moments beside masters.

A save is atomic: everything goes into `global_step_N.tmp`, is renamed when every rank has finished, and only then does
`latest` name it. A load checks sizes and checksums before it changes anything; all ranks fail together or not at all.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hybrid5d.checkpoint import manifest as files
from hybrid5d.checkpoint.manifest import WEIGHT, Manifest
from hybrid5d.checkpoint.shards import RNG, layout_of, shard_files, write_shards
from hybrid5d.checkpoint.sidecar import copy_sidecar
from hybrid5d.checkpoint.start_weights import TensorFiles, zero_padding
from hybrid5d.checkpoint.stored import fill_from_runs
from hybrid5d.engine.deepspeed.optimizer_state import OptimizerState, full_shape
from hybrid5d.errors import CheckpointError
from hybrid5d.parallel.agree import gather_objects, together, world_axis
from hybrid5d.parallel.pieces import Piece, pieces_of

if TYPE_CHECKING:
    from hybrid5d.engine.engine import Engine

# --- saving ---------------------------------------------------------------------------------------------------------


def _write_text(path: Path, text: str) -> None:
    """Write a file so that it is either the old or the new one, whole and on disk."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _publish(root: Path, temporary: Path, final: Path) -> None:
    """Rename the finished folder, then point `latest` at it. A crash at any line leaves a complete checkpoint."""
    _sync_folder(temporary / files.ACTOR)
    old = final.with_name(final.name + ".old")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(final, old)
    os.replace(temporary, final)
    _sync_folder(root)
    _write_text(root / files.LATEST, final.name + "\n")
    _sync_folder(root)
    shutil.rmtree(old, ignore_errors=True)


def _prepare(root: Path, temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    (temporary / files.ACTOR).mkdir(parents=True)


def save_checkpoint(engine: Engine, directory: str | Path, state: Mapping[str, Any] | None = None) -> Path:
    """Write `directory/global_step_N` and point `latest` at it; atomic. Collective over the world.

    Args:
        state: JSON-ready values of the caller (position in the data ...), handed back by `load_checkpoint`.

    Raises:
        CheckpointError: a rank could not write; every rank raises it, what was there before stays valid.
    """
    root, axis = Path(directory), world_axis()
    final = files.step_folder(root, engine.global_step)
    temporary = final.with_name(final.name + ".tmp")
    actor = temporary / files.ACTOR
    first = axis.rank == 0
    together(axis, lambda: _prepare(root, temporary) if first else None)
    access = OptimizerState(engine.ds.optimizer, engine.ctx.dp_cp)
    moments = tuple(sorted({m for found in gather_objects(access.moments(), axis) for m in found}))
    try:
        manifest = write_shards(engine, actor, moments, state or {})

        def finish() -> None:
            if first:
                faults = files.file_faults(actor, manifest)
                if faults:  # another node's files are not visible here
                    raise CheckpointError("\n".join([*faults, f"{root} must be on a file system that all nodes share"]))
                copy_sidecar(engine.plan.config.actor.model.model_path, engine.plan.model, actor / files.SIDECAR)
                _write_text(actor / files.MANIFEST, manifest.to_json())
                _publish(root, temporary, final)

        together(axis, finish)
    except CheckpointError:
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


# --- loading --------------------------------------------------------------------------------------------------------


def _named_pieces(module: nn.Module) -> Iterator[tuple[nn.Parameter, Piece]]:
    for param in module.parameters():
        for piece in pieces_of(param):
            yield param, piece


def _verified(engine: Engine, folder: Path) -> Manifest:
    """The manifest, after everything that can be checked without reading tensors."""
    manifest = files.read_manifest(folder)
    faults = files.file_faults(folder, manifest) or [f"{folder}: {gap}" for gap in files.uncovered(manifest)[:3]]
    if faults:
        raise CheckpointError("\n".join(faults))
    return manifest


def _misfits(engine: Engine, manifest: Manifest, access: OptimizerState, model_names: set[str]) -> list[str]:
    """Why this checkpoint cannot go on in this engine."""
    found: dict[str, None] = {}
    if manifest.optimizer["type"] != access.name:
        found[f"its optimizer is {manifest.optimizer['type']}, this run's is {access.name}"] = None
    for name in sorted(model_names - set(manifest.tensors))[:3]:
        found[f"it has no {name}"] = None
    for name in sorted(set(manifest.tensors) - model_names)[:3]:
        found[f"the model has no {name}, which it holds"] = None
    for param, piece in _named_pieces(engine.module):
        stored = manifest.tensors.get(piece.name)
        if stored is None:
            continue
        if stored.shape != tuple(piece.full_shape):
            found[f"its {piece.name} has shape {list(stored.shape)}, the model's {list(piece.full_shape)}"] = None
        missing = [m for m in manifest.kinds if m not in stored.runs]
        if param.requires_grad and missing:
            found[f"{piece.name} was frozen and has no {missing[0]}, but is to be trained now"] = None
    return list(found)


def _check_fit(engine: Engine, folder: Path, manifest: Manifest, access: OptimizerState) -> None:
    names: set[str] = set().union(*gather_objects({p.name for _, p in _named_pieces(engine.module)}, world_axis()))

    def compare() -> None:
        lines = _misfits(engine, manifest, access, names)
        if lines:
            now = files.describe_layout(layout_of(engine))
            raise CheckpointError(
                f"{folder} (saved by {manifest.layout_text()}) cannot be resumed by {now}: " + "; ".join(lines[:6])
            )

    together(world_axis(), compare)


def _restore(engine: Engine, folder: Path, manifest: Manifest, access: OptimizerState) -> None:
    """Overwrite masters, weights and moments of this rank."""
    with TensorFiles() as reader, torch.no_grad():
        for param in engine.module.parameters():
            pieces = pieces_of(param)
            if not pieces:
                continue
            shape = full_shape(param)
            for kind in manifest.kinds if param.requires_grad else (WEIGHT,):
                if kind != WEIGHT and access.fragment(param, kind) is None:
                    continue  # another dp x cp rank keeps these moments
                whole = torch.empty(shape, dtype=torch.float32)
                zero_padding(whole, pieces)
                for piece in pieces:
                    stored = manifest.tensors[piece.name]
                    fill_from_runs(piece.local_view(whole), piece, stored, kind, folder, reader)
                access.set(param, kind, whole)


def _restore_rng(engine: Engine, folder: Path, manifest: Manifest) -> None:
    """Random state belongs to a rank of a layout; another layout starts its own."""
    saved = {k: manifest.layout.get(k) for k in ("pp", "dp", "cp", "tp")}
    ctx = engine.ctx
    if saved != {k: getattr(ctx.layout, k) for k in saved}:
        return
    _, file = shard_files(ctx)
    with TensorFiles() as reader:
        torch.set_rng_state(reader.read(folder / file, RNG).clone())


def load_checkpoint(engine: Engine, directory: str | Path) -> dict[str, Any]:
    """Restore weights, masters, moments and step from a checkpoint of any layout. Collective over the world.

    Args:
        directory: a `checkpoints` folder (its newest), a `global_step_N` folder or its `actor` folder.

    Returns:
        What `save_checkpoint` was given as `state`.

    Raises:
        CheckpointError: missing, truncated or damaged files, another model or optimizer; on all ranks, with the engine
            as it was.
    """
    axis = world_axis()
    folder = together(axis, lambda: files.find_checkpoint(directory))
    manifest = together(axis, lambda: _verified(engine, folder))
    access = OptimizerState(engine.ds.optimizer, engine.ctx.dp_cp)
    _check_fit(engine, folder, manifest, access)
    mine = sorted(manifest.files)[axis.rank :: axis.size]

    def check_content() -> None:
        if faults := files.content_faults(folder, manifest, mine):
            raise CheckpointError("\n".join(faults))

    together(axis, check_content)
    moments = tuple(manifest.optimizer["state"])
    access.reset(moments, int(manifest.optimizer["step"]))

    def restore() -> None:
        _restore(engine, folder, manifest, access)
        _restore_rng(engine, folder, manifest)

    together(axis, restore)
    access.set_loss_scaler(dict(manifest.loss_scaler))
    engine.global_step = engine.ds.global_steps = manifest.step
    return dict(manifest.state)
