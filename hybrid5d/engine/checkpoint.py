"""Training checkpoints that any layout can load: tensors are stored by HF name and run, moments beside masters.

A save is atomic: everything goes into `global_step_N.tmp`, is renamed when every rank has finished, and only then does
`latest` name it. A load checks sizes and checksums before it changes anything; all ranks fail together or not at all.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hybrid5d.config import checkpoint_files as files
from hybrid5d.config.checkpoint_files import WEIGHT, Manifest, Run, StoredFile, StoredTensor
from hybrid5d.config.errors import CheckpointError
from hybrid5d.engine.optimizer_state import OptimizerState, full_shape
from hybrid5d.engine.sidecar import copy_sidecar
from hybrid5d.models.hf import TensorFiles, zero_padding
from hybrid5d.models.safetensors_writer import SafetensorsWriter
from hybrid5d.models.stored import fill_from_runs
from hybrid5d.parallel.agree import gather_objects, raise_together, together, world_axis
from hybrid5d.parallel.pieces import Piece, pieces_of

if TYPE_CHECKING:
    from hybrid5d.engine.engine import Engine

RNG = "rng/cpu"


@dataclass(frozen=True)
class _Entry:
    """One stored run as a rank declares it: `kind` of `piece`, out of local parameter number `index`."""

    index: int
    kind: str
    piece: Piece
    run: Run

    @property
    def key(self) -> str:
        return self.run.key(self.piece.name, self.kind)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in self.run.box(self.piece.full_shape))


# --- saving ---------------------------------------------------------------------------------------------------------


def saved_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Parameters this stage and tp rank save: those with an HF name that no lower stage or tp rank saves too."""
    return [
        p
        for p in module.parameters()
        if any(piece.replica == 0 for piece in pieces_of(p)) and not getattr(p, "ds_pipe_replicated", False)
    ]


def deal_owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """Spread parameters over `ranks` by size: the largest left goes to the least loaded; the same on every rank."""
    load, owner = [0] * ranks, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        rank = min(range(ranks), key=lambda r: (load[r], r))
        owner[i] = rank
        load[rank] += sizes[i]
    return owner


class _ShardSaver:
    """Writes this rank's files. An OS error is kept, not raised, so that the gathers of the other ranks go on."""

    def __init__(self, engine: Engine, folder: Path, moments: tuple[str, ...]):
        ctx = engine.ctx
        self.state = OptimizerState(engine.ds.optimizer, ctx.dp_cp)
        self.folder, self.moments, self.dp_cp = folder, moments, ctx.dp_cp
        self.params = saved_parameters(engine.module)
        self.owner = deal_owners([full_shape(p).numel() for p in self.params], ctx.dp_cp.size)
        shard = f"pp{ctx.pp.rank:02d}-tp{ctx.tp.rank:02d}"
        self.model_file, self.optim_file = (
            f"model-{shard}.safetensors",
            f"optim-{shard}-dp{ctx.dp_cp.rank:02d}.safetensors",
        )
        self.failure: OSError | None = None
        self.files: dict[str, StoredFile] = {}
        self.entries: list[_Entry] = []

    def _declare(self, file: str, kinds: Sequence[str]) -> list[_Entry]:
        found = []
        for i, param in enumerate(self.params):
            owner = 0 if kinds == (WEIGHT,) else self.owner[i]
            if owner != self.dp_cp.rank or (kinds != (WEIGHT,) and not param.requires_grad):
                continue
            for kind in kinds:
                for piece in pieces_of(param):
                    if piece.replica == 0 and piece.length:
                        found.append(_Entry(i, kind, piece, Run(file, piece.dim, piece.start, piece.stop)))
        return found

    def _write(self, file: str, kinds: tuple[str, ...], extra: Mapping[str, torch.Tensor]) -> None:
        """Gather and write `kinds` of every parameter. Collective over dp_cp."""
        entries = self._declare(file, kinds)
        layout = {e.key: (self._dtype(e), e.shape) for e in entries}
        layout |= {name: (t.dtype, tuple(t.shape)) for name, t in extra.items()}
        writer = self._open(file, layout) if layout else None
        try:
            self._write_entries(writer, entries, kinds)
            for name, tensor in extra.items():
                self._put(writer, name, tensor)
        finally:
            if writer is not None:
                self._close(writer, file)
        self.entries += entries

    def _write_entries(self, writer: SafetensorsWriter | None, entries: list[_Entry], kinds: tuple[str, ...]) -> None:
        for i, param in enumerate(self.params):
            if kinds != (WEIGHT,) and not param.requires_grad:
                continue
            owner = 0 if kinds == (WEIGHT,) else self.owner[i]
            for kind in kinds:
                whole = self.state.gather(param, kind, owner)
                for e in (e for e in entries if e.index == i and e.kind == kind):
                    assert whole is not None
                    self._put(writer, e.key, e.piece.local_view(whole))

    def _dtype(self, entry: _Entry) -> torch.dtype:
        param = self.params[entry.index]
        return torch.float32 if param.requires_grad else param.dtype

    def _open(self, file: str, layout: Mapping[str, Any]) -> SafetensorsWriter | None:
        try:
            return SafetensorsWriter(self.folder / file, layout)
        except OSError as exc:
            self.failure = self.failure or exc
            return None

    def _put(self, writer: SafetensorsWriter | None, key: str, values: torch.Tensor) -> None:
        if writer is None or self.failure is not None:
            return
        try:
            writer.write(key, values)
        except OSError as exc:
            exc.filename = exc.filename or str(writer.path)
            self.failure = exc

    def _close(self, writer: SafetensorsWriter, file: str) -> None:
        try:
            writer.__exit__(*((None, None, None) if self.failure is None else (OSError, self.failure, None)))
        except OSError as exc:
            exc.filename = exc.filename or str(writer.path)
            self.failure = self.failure or exc
        self.files[file] = StoredFile(writer.size, writer.crc32)

    def save(self) -> None:
        """Masters by dp_cp rank 0 of each shard, moments by their owners, random state by every rank."""
        self._write(self.model_file, (WEIGHT,), {})
        self._write(self.optim_file, self.moments, {RNG: torch.get_rng_state()})


def _layout_of(engine: Engine) -> dict[str, Any]:
    layout, plan = engine.ctx.layout, engine.plan
    degrees = {a: getattr(layout, a) for a in ("pp", "dp", "cp", "tp")}
    name = type(engine.ds.optimizer.optimizer).__name__
    more = {"sequence_parallel": engine.ctx.sequence_parallel, "zero_stage": plan.zero_stage, "optimizer": name}
    return {**degrees, **more}


def _merge(
    reports: list[tuple[dict[str, StoredFile], list[tuple[str, tuple[int, ...], bool, str, Run]]]],
) -> tuple[dict[str, StoredTensor], dict[str, StoredFile]]:
    """Put the ranks' declarations together."""
    stored: dict[str, StoredFile] = {}
    runs: dict[str, dict[str, list[Run]]] = {}
    about: dict[str, tuple[tuple[int, ...], bool]] = {}
    for rank_files, entries in reports:
        stored.update(rank_files)
        for name, shape, trainable, kind, run in entries:
            about[name] = (shape, trainable)
            runs.setdefault(name, {}).setdefault(kind, []).append(run)
    tensors = {
        name: StoredTensor(*about[name], {kind: tuple(r) for kind, r in kinds.items()}) for name, kinds in runs.items()
    }
    return tensors, stored


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


def write_shards(engine: Engine, folder: Path, moments: tuple[str, ...], state: Mapping[str, Any]) -> Manifest:
    """Every rank writes its shard into `folder`, which exists; returns the manifest. Collective over the world.

    Raises:
        CheckpointError: a rank could not write; on all ranks.
    """
    axis = world_axis()
    saver = _ShardSaver(engine, folder, moments)
    saver.save()
    raise_together(axis, saver.failure)
    declared = [
        (e.piece.name, e.piece.full_shape, saver.params[e.index].requires_grad, e.kind, e.run) for e in saver.entries
    ]
    tensors, stored = _merge(gather_objects((saver.files, declared), axis))
    access = saver.state
    manifest = Manifest(
        step=engine.global_step,
        layout=_layout_of(engine),
        precision=engine.plan.precision.dtype,
        optimizer={"type": access.name, "state": list(moments), "step": access.step() if moments else 0},
        tensors=tensors,
        files=stored,
        loss_scaler=access.loss_scaler(),
        state=dict(state),
    )
    gaps = files.uncovered(manifest)
    assert not gaps, f"a checkpoint would miss {gaps[:3]}"
    return manifest


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
            now = files.describe_layout(_layout_of(engine))
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
    file = f"optim-pp{ctx.pp.rank:02d}-tp{ctx.tp.rank:02d}-dp{ctx.dp_cp.rank:02d}.safetensors"
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
