"""Read the header of a safetensors file with nothing but the standard library: names, dtypes, shapes, offsets.

Format: 8 bytes little-endian header length, a JSON object name -> {dtype, shape, data_offsets}, then the data.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "U64": 8, "U32": 4, "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
MAX_HEADER = 100_000_000  # the format's own bound


class HeaderError(ValueError):
    """A file that is no sound safetensors file; the text is one line that names it."""


@dataclass(frozen=True)
class TensorHeader:
    """One tensor of a file; `start` and `stop` are byte offsets from the start of the data section."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def _reason(exc: OSError) -> str:
    return exc.strerror or str(exc)


def _raw_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header's JSON object and the size of the data section."""
    try:
        size = path.stat().st_size
        if size < 8:
            raise HeaderError(f"{path} has {size} bytes: it is empty or truncated")
        with open(path, "rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            if length > min(MAX_HEADER, size - 8):
                raise HeaderError(
                    f"{path} is truncated or no safetensors file (header of {length} bytes in a file of {size})"
                )
            text = f.read(length)
    except OSError as exc:
        raise HeaderError(f"{path} cannot be read: {_reason(exc)}") from None
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise HeaderError(f"{path}: its header is not JSON") from None
    if not isinstance(header, dict):
        raise HeaderError(f"{path}: its header is no JSON object")
    return header, size - 8 - length


def _tensor(path: Path, name: str, value: Any, data_size: int) -> TensorHeader:
    try:
        shape, (start, stop) = tuple(value["shape"]), value["data_offsets"]
        dtype = str(value["dtype"])
    except (KeyError, TypeError, ValueError):
        raise HeaderError(f"{path}: the header entry of {name} is malformed") from None
    if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
        raise HeaderError(f"{path}: the header entry of {name} is malformed")
    if stop > data_size:
        raise HeaderError(f"{path} is truncated: {name} ends at data byte {stop} of {data_size}")
    wanted = prod(shape) * DTYPE_BYTES.get(dtype, 0)
    if start > stop or (dtype in DTYPE_BYTES and stop - start != wanted):
        raise HeaderError(
            f"{path}: {name} of shape {list(shape)} and dtype {dtype} does not fit its {stop - start} bytes"
        )
    return TensorHeader(dtype, shape, start, stop)


def read_header(path: str | os.PathLike[str]) -> dict[str, TensorHeader]:
    """The tensors of a safetensors file, checked against the file's size; no data is read.

    Raises:
        HeaderError: unreadable, empty, truncated or malformed.
    """
    path = Path(path)
    header, data_size = _raw_header(path)
    return {n: _tensor(path, n, v, data_size) for n, v in header.items() if n != "__metadata__"}
