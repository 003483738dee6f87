"""One rank's part of a checkpoint: which runs it stores, gathered over dp x cp and written tensor by tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hybrid5d.checkpoint import manifest as files
from hybrid5d.checkpoint.manifest import WEIGHT, Manifest, Run, StoredFile, StoredTensor
from hybrid5d.checkpoint.safetensors_writer import SafetensorsWriter
from hybrid5d.engine.deepspeed.optimizer_state import OptimizerState, full_shape
from hybrid5d.parallel.agree import gather_objects, raise_together, world_axis
from hybrid5d.parallel.context import ParallelContext
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


def shard_files(ctx: ParallelContext) -> tuple[str, str]:
    """Names of a rank's model file (one per stage and tp rank) and optimizer file (its own)."""
    shard = f"pp{ctx.pp.rank:02d}-tp{ctx.tp.rank:02d}"
    return f"model-{shard}.safetensors", f"optim-{shard}-dp{ctx.dp_cp.rank:02d}.safetensors"


class _ShardSaver:
    """Writes this rank's files. An OS error is kept, not raised, so that the gathers of the other ranks go on."""

    def __init__(self, engine: Engine, folder: Path, moments: tuple[str, ...]):
        ctx = engine.ctx
        self.state = OptimizerState(engine.ds.optimizer, ctx.dp_cp)
        self.folder, self.moments, self.dp_cp = folder, moments, ctx.dp_cp
        self.params = saved_parameters(engine.module)
        self.owner = deal_owners([full_shape(p).numel() for p in self.params], ctx.dp_cp.size)
        self.model_file, self.optim_file = shard_files(ctx)
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
        mine: dict[tuple[int, str], list[_Entry]] = defaultdict(list)
        for entry in entries:
            mine[entry.index, entry.kind].append(entry)
        for i, param in enumerate(self.params):
            if kinds != (WEIGHT,) and not param.requires_grad:
                continue
            owner = 0 if kinds == (WEIGHT,) else self.owner[i]
            for kind in kinds:
                whole = self.state.gather(param, kind, owner)
                for entry in mine[i, kind]:
                    assert whole is not None
                    self._put(writer, entry.key, entry.piece.local_view(whole))

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


def layout_of(engine: Engine) -> dict[str, Any]:
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
        layout=layout_of(engine),
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
