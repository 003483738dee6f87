"""Copies that must be equal to the bit, compared by checksums: what a flipped bit or a lost message leaves apart.

What is compared follows from what each parameter's shard says that it holds:

| what | with |
|---|---|
| a weight's rows or columns (ZeRO 0 to 2) | the same of every rank that holds them: dp and cp; all of tp where the tensor is not cut; ranks that share a kv head; both stages of a tied matrix |
| a part of a weight (ZeRO 3), of a master, of a moment | the same part on ranks that hold the same rows: as above without dp and cp |
| a weight | its own fp32 master in the weight's precision, on the rank that holds that part of it |

Moments and masters of tensors that tp cuts have no copy; a master is still compared with its weight.
"""  # noqa: E501

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybrid5d.checkpoint.manifest import WEIGHT
from hybrid5d.console import ranks_text
from hybrid5d.engine.deepspeed.optimizer_state import OptimizerState
from hybrid5d.parallel.agree import gather_objects, world_axis
from hybrid5d.parallel.shard import Piece, pieces_of

_BLOCK = 1 << 24  # elements that go to the CPU at a time
_LINES = 8


class Held(NamedTuple):
    """Values that a rank holds; ranks with an equal one must hold the same bits.

    Attributes:
        kind: `weight`, or of the optimizer: `master`, a moment's name.
        pieces: (tensor, dimension, first, past the last) of the parameter's pieces.
        start, length: of the run of its flattened elements, where it is cut over dp x cp; 0, 0: whole.
    """

    kind: str
    pieces: tuple[tuple[str, int | None, int, int], ...]
    start: int = 0
    length: int = 0

    def __str__(self) -> str:
        part = f", elements {self.start} to {self.start + self.length - 1}" if self.length else ""
        return f"{self.kind} of {' and '.join(name for name, *_ in self.pieces)}{part}"


def checksum(x: Tensor) -> int:
    """CRC-32 of the bits in order."""
    value = 0
    for block in x.detach().contiguous().view(-1).split(_BLOCK):
        value = zlib.crc32(block.cpu().view(torch.uint8).numpy(), value)
    return value


def _part(param: nn.Parameter) -> Tensor | None:
    """What ZeRO 3 keeps of a parameter on this rank, flat."""
    part: Tensor | None = getattr(param, "ds_tensor", None)
    return None if part is None else part.detach().view(-1)


def _place(piece: Piece) -> tuple[str, int | None, int, int]:
    return piece.name, piece.cut.dim, piece.cut.start, piece.cut.stop


def _held(module: nn.Module, optimizer: OptimizerState) -> Iterator[tuple[Held, Tensor]]:
    moments = optimizer.moments()
    for param in module.parameters():
        pieces = pieces_of(param)
        places = tuple(map(_place, pieces))
        if (part := _part(param)) is not None:
            yield Held("weight", places, part.numel() * optimizer.dp_cp.rank, part.numel()), part
        else:
            for piece, place in zip(pieces, places):
                yield Held("weight", (place,)), piece.local_view(param)
        for kind in (WEIGHT, *moments) if pieces and param.requires_grad else ():
            if (fragment := optimizer.fragment(param, kind)) is not None:
                name = "master" if kind == WEIGHT else kind
                yield Held(name, places, fragment.start, fragment.values.numel()), fragment.values


def _unlike_master(param: nn.Parameter, optimizer: OptimizerState) -> bool:
    """Whether this rank's part of the master, in the weight's precision, has other bits than the weight."""
    if not pieces_of(param) or not param.requires_grad or (master := optimizer.fragment(param, WEIGHT)) is None:
        return False
    part = _part(param)
    flat, start = (param.detach().view(-1), master.start) if part is None else (part, 0)
    own = flat.narrow(0, start, master.values.numel())
    return checksum(own) != checksum(master.values.to(own.dtype))


def differing(reports: Sequence[Mapping[Held, int]]) -> list[str]:
    """What ranks hold alike and is not alike: `reports` are checksums by rank. Names the odd ranks, or all of two."""
    holders: dict[Held, dict[int, list[int]]] = {}
    for rank, report in enumerate(reports):
        for held, value in report.items():
            holders.setdefault(held, {}).setdefault(value, []).append(rank)
    lines = []
    for held, groups in holders.items():
        if len(groups) < 2:
            continue
        most, *others = sorted(groups.values(), key=len, reverse=True)
        odd = sorted(rank for ranks in others for rank in ranks)
        if len(most) > len(odd):
            lines.append(f"{held}: {ranks_text(odd)} against {ranks_text(most)}")
        else:
            sides = " against ".join(map(ranks_text, sorted(groups.values())))
            lines.append(f"{held}: {sides}, and nothing says which is right")
    return lines


@torch.no_grad()
def replica_faults(module: nn.Module, optimizer: OptimizerState) -> list[str]:
    """Copies that are not equal to the bit, a line each; the same on every rank. Collective over the world."""
    sums = {held: checksum(values) for held, values in _held(module, optimizer)}
    apart = [p for p in module.parameters() if _unlike_master(p, optimizer)]
    names = [" and ".join(piece.name for piece in pieces_of(p)) for p in apart]
    reports = gather_objects((sums, names), world_axis())
    lines = differing([found for found, _ in reports])
    lines += [
        f"weight of {name}: rank {rank}'s is not its own master's"
        for rank, (_, found) in enumerate(reports) for name in found
    ]  # fmt: skip
    more = [f"and {len(lines) - _LINES} more"] if len(lines) > _LINES else []
    return [*lines[:_LINES], *more]
