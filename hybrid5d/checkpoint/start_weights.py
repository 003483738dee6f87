"""Start weights from a Hugging Face folder: each rank reads only the slices its parameters are made of."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from hybrid5d.errors import CheckpointError, ConfigErrors
from hybrid5d.hf.folder import (
    EMBEDDING,
    HEAD,
    HEAD_DIFFERS,
    UNTIE,
    VALUE_HEAD,
    HfWeights,
    has_safetensors,
    inspect_hf_folder,
)
from hybrid5d.hf.spec import ModelSpec
from hybrid5d.parallel.agree import together, world_axis
from hybrid5d.parallel.context import Axis
from hybrid5d.parallel.shard import Piece, pieces_of
from hybrid5d.plan.tensors import shapes

__all__ = ["LoadReport", "TensorFiles", "check_finite", "has_safetensors", "load_hf_weights", "zero_padding"]


@dataclass(frozen=True)
class LoadReport:
    """What this rank read: bytes of tensor data and number of slices."""

    bytes_read: int
    slices: int


class TensorFiles:
    """Slices out of safetensors files, opened once each and mapped, not read whole. A context manager."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._open: dict[Path, safe_open] = {}
        self.bytes_read = self.slices = 0

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.clear()
        self._stack.close()

    def _file(self, path: Path) -> safe_open:
        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._open[path]

    def holds(self, path: Path, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self._file(path).keys()  # noqa: SIM118  it is no dict

    def read(self, path: Path, name: str, box: tuple[slice, ...] = ()) -> Tensor:
        """The part `box` (one slice a dimension; () = all) of a tensor; a view of the mapped file.

        Raises:
            CheckpointError: the file cannot be read.
        """
        try:
            part = self._file(path).get_slice(name)[box or slice(None)]
        except (OSError, SafetensorError) as exc:
            raise CheckpointError(f"{path}: {name} cannot be read: {exc}") from None
        self.bytes_read += part.numel() * part.element_size()
        self.slices += 1
        return part


def zero_padding(local: Tensor, pieces: Iterable[Piece]) -> None:
    """Zero the rows of a local tensor that no piece covers (vocabulary padding)."""
    runs = sorted((p.offset, p.offset + p.length) for p in pieces if p.cut.dim is not None)
    dims = {p.cut.dim for p in pieces if p.cut.dim is not None}
    if not dims:
        return
    (dim,) = dims
    at = 0
    for start, stop in [*runs, (local.shape[dim], local.shape[dim])]:
        if start > at:
            local.narrow(dim, at, start - at).zero_()
        at = max(at, stop)


def check_finite(values: Tensor, name: str, path: Path) -> None:
    """Raise CheckpointError where a NaN or an infinity is among the values (min and max show either)."""
    if not values.numel():
        return
    low, high = torch.aminmax(values)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise CheckpointError(f"{path}: {name} holds NaN or infinite values; the weights are damaged")


def _fill(param: nn.Parameter, weights: HfWeights, files: TensorFiles, faults: list[str]) -> None:
    pieces = pieces_of(param)
    zero_padding(param.data, pieces)
    for piece in pieces:
        if not piece.length:
            continue
        name = weights.source(piece.name)
        if name == VALUE_HEAD and name not in weights.tensors:
            continue  # stays as it was made: `inspect_hf_folder` lets this one be missing
        path, _ = weights.tensors[name]
        part = files.read(path, name, piece.cut.slices(piece.full_shape))
        piece.local_view(param.data).copy_(part)
        try:
            check_finite(part, name, path)
            _check_tie(part, piece, name, weights, files)
        except CheckpointError as exc:
            faults.append(str(exc))


def _check_tie(part: Tensor, piece: Piece, name: str, weights: HfWeights, files: TensorFiles) -> None:
    """Raise CheckpointError where a tied model's folder stores a head of its own: transformers would not tie it."""
    if not weights.tied or name != EMBEDDING or HEAD not in weights.tensors:
        return
    path, _ = weights.tensors[HEAD]
    if not torch.equal(files.read(path, HEAD, piece.cut.slices(piece.full_shape)).to(part.dtype), part):
        raise CheckpointError(f"{path}: {HEAD_DIFFERS}. Fix: {UNTIE}")


def _load_local(module: nn.Module, folder: Path, spec: ModelSpec) -> LoadReport:
    weights, errors = inspect_hf_folder(folder, spec, shapes(spec))
    if errors:
        raise ConfigErrors(errors)
    faults: list[str] = []
    with TensorFiles() as files, torch.no_grad():
        for param in module.parameters():
            _fill(param, weights, files, faults)
        if faults:
            raise CheckpointError("\n".join(dict.fromkeys(faults)))
        return LoadReport(files.bytes_read, files.slices)


def load_hf_weights(module: nn.Module, folder: str | Path, spec: ModelSpec, axis: Axis | None = None) -> LoadReport:
    """Fill a module's parameters, each in its own dtype, from a folder's safetensors; vocabulary padding is zero.

    All faults that headers show are found before any data is read. Collective over `axis` (None: all ranks): where one
    rank fails, all raise.

    Raises:
        ConfigErrors: files missing, truncated or pickled; names or shapes that are not this model's.
        CheckpointError: values that are not finite, data that cannot be read.
    """
    return together(axis or world_axis(), lambda: _load_local(module, Path(folder), spec))
