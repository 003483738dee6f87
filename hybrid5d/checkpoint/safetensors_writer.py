"""Write a safetensors file tensor by tensor, so that memory holds one at a time; size and checksum come for free."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from hybrid5d.config.dtypes import STORED

TORCH_NAMES: dict[torch.dtype, str] = {getattr(torch, row.hf): name for name, row in STORED.items()}
Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def tensor_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Size of a stored tensor."""
    return prod(shape) * STORED[TORCH_NAMES[dtype]].size


class SafetensorsWriter:
    """A file whose tensors, with dtype and shape, are known beforehand, written in that order. A context manager.

    Leaving the block without an error flushes the file to disk.
    """

    def __init__(self, path: Path, tensors: Layout, metadata: Mapping[str, str] | None = None):
        self.path, self._layout, self._names = path, tensors, iter(tensors)
        self.crc32 = self.size = 0
        header: dict[str, object] = {"__metadata__": dict(metadata or {"format": "pt"})}
        at = 0
        for name, (dtype, shape) in tensors.items():
            stop = at + tensor_bytes(dtype, shape)
            header[name] = {"dtype": TORCH_NAMES[dtype], "shape": list(shape), "data_offsets": [at, stop]}
            at = stop
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data section starts aligned
        self._file = open(path, "wb")  # noqa: SIM115  closed by __exit__
        self._put(struct.pack("<Q", len(text)) + text)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Failures of writing name the file: the system's own (disk full) do not."""
        try:
            yield
        except OSError as exc:
            raise OSError(exc.errno, exc.strerror or str(exc), str(self.path)) from exc

    def _put(self, data: bytes | memoryview) -> None:
        with self._named():
            self._file.write(data)
        self.crc32 = zlib.crc32(data, self.crc32)
        self.size += len(data)

    def write(self, name: str, tensor: Tensor) -> None:
        """Append the next tensor, cast to its declared dtype."""
        expected = next(self._names, None)
        dtype, shape = self._layout[name]
        assert name == expected and tuple(tensor.shape) == shape, (
            f"{name} {tuple(tensor.shape)}: {expected} {shape} is next"
        )
        flat = tensor.detach().to("cpu", dtype).contiguous().view(-1)
        if flat.numel():
            self._put(flat.view(torch.uint8).numpy().data)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._named(), self._file:  # closing flushes, too
            if kind is None:
                left = next(self._names, None)
                assert left is None, f"{left} was never written"
                self._file.flush()
                os.fsync(self._file.fileno())
