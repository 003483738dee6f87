"""One rank's part of a checkpoint: which runs it stores, gathered over dp x cp and written tensor by tensor."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from hybrid5d.checkpoint.manifest import WEIGHT, Run, StoredFile, StoredTensor
from hybrid5d.checkpoint.safetensors_writer import Layout, SafetensorsWriter, tensor_bytes
from hybrid5d.checkpoint.state import TrainState
from hybrid5d.errors import CheckpointError
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
class Entry:
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


def _entries(param: nn.Parameter, kind: str, file: str) -> list[Entry]:
    return [
        Entry(piece, param.requires_grad, kind, Run(file, piece.cut.dim, piece.cut.start, piece.cut.stop))
        for piece in pieces_of(param)
        if piece.length
    ]


@dataclass(frozen=True)
class ShardFile:
    """A file of this rank: what its values are gathered from, what it will hold (nothing where `layout` is empty)."""

    name: str
    gathers: Sequence[_Gather]
    extra: Mapping[str, Tensor]
    entries: Sequence[Entry]
    layout: Layout

    @property
    def bytes(self) -> int:
        """About as many as it will have."""
        return sum(tensor_bytes(*about) + _HEADER_BYTES for about in self.layout.values())


def planned_files(state: TrainState, moments: Sequence[str]) -> list[ShardFile]:
    """This rank's files: masters by dp_cp rank 0 of each shard, moments spread over its ranks, random state by each."""
    ctx, params = state.ctx, saved_parameters(state.module)
    owners = deal_owners([state.optimizer.shape(p).numel() for p in params], ctx.dp_cp.size)
    model, optim = shard_files(ctx)
    masters = [(p, WEIGHT, 0) for p in params]
    rest = [(p, kind, owner) for p, owner in zip(params, owners) if p.requires_grad for kind in moments]
    planned = []
    for name, gathers, extra in ((model, masters, {}), (optim, rest, random_state())):
        mine = [g for g in gathers if g[2] == ctx.dp_cp.rank]
        entries = [(e, param) for param, kind, _ in mine for e in _entries(param, kind, name)]
        layout = {e.key: (torch.float32 if e.trainable else param.dtype, e.shape) for e, param in entries}
        layout |= {key: (t.dtype, tuple(t.shape)) for key, t in extra.items()}
        planned.append(ShardFile(name, gathers, extra, [e for e, _ in entries], layout))
    return planned


def gathered(state: TrainState, file: ShardFile) -> Iterator[tuple[str, Tensor]]:
    """What a file holds, tensor by tensor; views of live memory among them. Collective over dp x cp."""
    for param, kind, owner in file.gathers:
        whole = state.optimizer.gather(param, kind, owner)
        if whole is not None:
            for entry in _entries(param, kind, file.name):
                yield entry.key, entry.piece.local_view(whole)
    yield from file.extra.items()


def write_file(path: Path, layout: Layout, values: Iterator[tuple[str, Tensor]]) -> StoredFile | None:
    """Write a file; None where it holds nothing. `values` are drawn to their end, whatever becomes of the file.

    Raises:
        OSError: it names the file.
    """
    try:
        if not layout:
            return None
        with SafetensorsWriter(path, layout) as writer:
            for key, tensor in values:
                writer.write(key, tensor)
        return StoredFile(writer.size, writer.crc32)
    except OSError as exc:
        exc.filename = exc.filename or str(path)
        raise
    finally:
        for _ in values:  # the others' gathers need this rank
            pass


def check_room(folder: Path, needed: int) -> None:
    """Raises CheckpointError: the disk has less free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"{folder}: a checkpoint takes {needed / 1e6:,.1f} MB, {free / 1e6:,.1f} MB are free. "
            "Fix: make room, or keep fewer checkpoints (runner.keep_last)"
        )


def random_state() -> dict[str, Tensor]:
    """The states of this rank's random generators."""
    there = {CUDA_RNG: torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {}
    return {RNG: torch.get_rng_state()} | there


def stored_tensors(entries: Iterable[Entry]) -> dict[str, StoredTensor]:
    """The manifest's account of what all ranks store."""
    runs: dict[str, dict[str, list[Run]]] = {}
    about: dict[str, tuple[tuple[int, ...], bool]] = {}
    for entry in entries:
        about[entry.piece.name] = (entry.piece.full_shape, entry.trainable)
        runs.setdefault(entry.piece.name, {}).setdefault(entry.kind, []).append(entry.run)
    return {
        name: StoredTensor(*about[name], {kind: tuple(r) for kind, r in kinds.items()}) for name, kinds in runs.items()
    }
