"""One rank's part of a checkpoint: which runs it stores, gathered over dp x cp and written tensor by tensor."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybrid5d.checkpoint import manifest as files
from hybrid5d.checkpoint.manifest import WEIGHT, Manifest, Run, StoredFile, StoredTensor
from hybrid5d.checkpoint.safetensors_writer import SafetensorsWriter, tensor_bytes
from hybrid5d.checkpoint.state import TrainState
from hybrid5d.errors import CheckpointError
from hybrid5d.parallel.agree import gather_objects, raise_together, together, world_axis
from hybrid5d.parallel.context import ParallelContext
from hybrid5d.parallel.shard import Piece, pieces_of, shard_of

RNG = "rng/cpu"
CUDA_RNG = "rng/cuda"
_HEADER_BYTES = 160  # of a tensor's line in a file's header, about


def saved_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Parameters this stage and tp rank save: those with an HF name that no lower stage or tp rank saves too."""
    kept = []
    for param in module.parameters():
        shard = shard_of(param)
        # DeepSpeed flags the tied matrix of a later stage, too
        if shard is not None and shard.replica == 0 and not getattr(param, "ds_pipe_replicated", False):
            kept.append(param)
    return kept


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


@dataclass(frozen=True)
class _Entry:
    """One stored run of a tensor, as the rank that writes it reports it to all."""

    piece: Piece
    trainable: bool
    kind: str
    run: Run

    @property
    def key(self) -> str:
        return self.run.key(self.piece.name, self.kind)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in self.run.cut.box(self.piece.full_shape))


_Gather = tuple[nn.Parameter, str, int]  # parameter, kind, the dp x cp rank that gets its values and writes them


def _entries(param: nn.Parameter, kind: str, file: str) -> list[_Entry]:
    return [
        _Entry(piece, param.requires_grad, kind, Run(file, piece.cut.dim, piece.cut.start, piece.cut.stop))
        for piece in pieces_of(param)
        if piece.length
    ]


def _write(
    state: TrainState, path: Path, gathers: Sequence[_Gather], extra: Mapping[str, Tensor]
) -> tuple[list[_Entry], StoredFile | None]:
    """Gather, and write this rank's file: what it stores there, and the file (None: nothing). Collective over dp x cp.

    Raises:
        OSError: after this rank has done its part of every gather; it names the file.
    """

    def values() -> Iterator[tuple[str, Tensor]]:
        for param, kind, owner in gathers:
            whole = state.optimizer.gather(param, kind, owner)
            if whole is not None:
                for entry in _entries(param, kind, path.name):
                    yield entry.key, entry.piece.local_view(whole)
        yield from extra.items()

    entries, layout = _contents(state, path, gathers, extra)
    gathered, stored = values(), None
    try:
        if layout:
            with SafetensorsWriter(path, layout) as writer:
                for key, tensor in gathered:
                    writer.write(key, tensor)
            stored = StoredFile(writer.size, writer.crc32)
    except OSError as exc:
        exc.filename = exc.filename or str(path)
        raise
    finally:
        for _ in gathered:  # the others' gathers need this rank, whatever became of its file
            pass
    return entries, stored


def _contents(
    state: TrainState, path: Path, gathers: Sequence[_Gather], extra: Mapping[str, Tensor]
) -> tuple[list[_Entry], dict[str, tuple[torch.dtype, tuple[int, ...]]]]:
    """What this rank's file will hold."""
    mine = [g for g in gathers if g[2] == state.ctx.dp_cp.rank]
    entries = [(e, param) for param, kind, _ in mine for e in _entries(param, kind, path.name)]
    layout = {e.key: (torch.float32 if e.trainable else param.dtype, e.shape) for e, param in entries}
    layout |= {key: (t.dtype, tuple(t.shape)) for key, t in extra.items()}
    return [e for e, _ in entries], layout


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(f"{folder}: a checkpoint takes {needed / 1e6:,.1f} MB, {free / 1e6:,.1f} MB are free")


def random_state() -> dict[str, Tensor]:
    """The states of this rank's random generators."""
    there = {CUDA_RNG: torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {}
    return {RNG: torch.get_rng_state()} | there


def write_shards(state: TrainState, folder: Path, moments: tuple[str, ...], extra: Mapping[str, Any]) -> Manifest:
    """Every rank writes its shard into `folder`, which exists; returns the manifest. Collective over the world.

    Masters by dp_cp rank 0 of each shard, moments spread over its ranks, random state by every rank.

    Raises:
        CheckpointError: a rank could not write; on all ranks.
    """
    axis, access, ctx = world_axis(), state.optimizer, state.ctx
    params = saved_parameters(state.module)
    owners = deal_owners([access.shape(p).numel() for p in params], ctx.dp_cp.size)
    model, optim = shard_files(ctx)
    masters = [(p, WEIGHT, 0) for p in params]
    rest = [(p, kind, owner) for p, owner in zip(params, owners) if p.requires_grad for kind in moments]
    written: dict[str, StoredFile] = {}
    entries: list[_Entry] = []
    failure: OSError | None = None
    parts: tuple[tuple[str, list[_Gather], dict[str, Tensor]], ...]
    parts = ((model, masters, {}), (optim, rest, random_state()))
    layouts = [_contents(state, folder / name, gathers, more)[1] for name, gathers, more in parts]
    mine = sum(tensor_bytes(*about) + _HEADER_BYTES for layout in layouts for about in layout.values())
    offers = gather_objects((mine, secrets.token_hex(8)), axis)
    together(axis, lambda: _check_room(folder, sum(size for size, _ in offers)) if axis.rank == 0 else None)
    for name, gathers, more in parts:
        try:
            found, stored = _write(state, folder / name, gathers, more)
        except OSError as exc:  # not raised yet: the second file's gathers need this rank
            failure = failure or exc
            continue
        entries += found
        written |= {} if stored is None else {name: stored}
    raise_together(axis, failure)
    tensors, stored_files = _merge(gather_objects((written, entries), axis))
    manifest = Manifest(
        step=state.step,
        layout=state.layout(),
        precision=state.plan.precision.dtype,
        optimizer={"type": access.name, "state": list(moments), "step": access.step() if moments else 0},
        tensors=tensors,
        files=stored_files,
        loss_scaler=access.loss_scaler(),
        skipped=state.skipped,
        state=dict(extra),
        id=offers[0][1],
        follows=state.follows,
    )
    gaps = files.uncovered(manifest)
    assert not gaps, f"a checkpoint would miss {gaps[:3]}"
    return manifest


def _merge(
    reports: Sequence[tuple[dict[str, StoredFile], list[_Entry]]],
) -> tuple[dict[str, StoredTensor], dict[str, StoredFile]]:
    """Put the ranks' reports together."""
    stored = {name: file for written, _ in reports for name, file in written.items()}
    runs: dict[str, dict[str, list[Run]]] = {}
    about: dict[str, tuple[tuple[int, ...], bool]] = {}
    for entry in (e for _, entries in reports for e in entries):
        about[entry.piece.name] = (entry.piece.full_shape, entry.trainable)
        runs.setdefault(entry.piece.name, {}).setdefault(entry.kind, []).append(entry.run)
    tensors = {
        name: StoredTensor(*about[name], {kind: tuple(r) for kind, r in kinds.items()}) for name, kinds in runs.items()
    }
    return tensors, stored
