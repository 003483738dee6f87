"""Tokenised samples on disk: one flat memory-mapped array of tokens, offsets per sample, targets beside it.

Files of a store folder: `tokens.bin`, `offsets.npy` [n+1], `samples.npy` [n, 3], `documents.npy`, `meta.json`, and
`mask.bin` (uint8: token is a target) or `labels.bin` (int32, aligned with the tokens) where not every token is one.
`meta.json` has the CRC-32 of each: a file with other content than was written is no store.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from hybrid5d.data.types import IGNORE_INDEX
from hybrid5d.files import crc32_of

FORMAT_VERSION = 2
Targets = Literal["all", "mask", "labels"]
_TARGET_FILES: dict[str, tuple[str, type[np.generic]]] = {
    "mask": ("mask.bin", np.uint8),
    "labels": ("labels.bin", np.int32),
}


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds every token id."""
    return np.dtype(np.uint16) if vocab_size <= 1 << 16 else np.dtype(np.int32)


def _create(path: Path) -> BinaryIO:
    return open(path, "wb", buffering=1 << 20)


class StoreWriter:
    """Writes samples one after another; memory use is 20 bytes a sample, whatever their length.

    A sample may arrive in several pieces: `append(ids, targets)` any number of times, then `end_sample`.
    """

    def __init__(self, folder: Path, *, vocab_size: int, targets: Targets):
        self.folder, self.vocab_size, self.targets = folder, vocab_size, targets
        self._dtype = token_dtype(vocab_size)
        self._tokens: BinaryIO = _create(folder / "tokens.bin")
        self._extra: BinaryIO | None = None
        if targets != "all":
            self._extra = _create(folder / _TARGET_FILES[targets][0])
        self._offsets = array("q", [0])
        self._samples = array("i")
        self._documents = array("q")
        self._pending, self._first_target = 0, -1

    def append(self, ids: np.ndarray, targets: np.ndarray | None = None) -> None:
        self._tokens.write(np.ascontiguousarray(ids, dtype=self._dtype).data)
        if self._extra is not None:
            assert targets is not None and targets.shape == ids.shape
            self._extra.write(np.ascontiguousarray(targets, dtype=_TARGET_FILES[self.targets][1]).data)
        if self._first_target < 0:
            self._first_target = self._find_target(ids, targets)
        self._pending += int(ids.shape[0])

    def _find_target(self, ids: np.ndarray, targets: np.ndarray | None) -> int:
        """Place in the sample of the first target that a model can be asked for (never its first token), or -1."""
        if targets is None:
            hits = np.ones(ids.shape, bool)
        else:
            hits = targets != (IGNORE_INDEX if self.targets == "labels" else 0)
        if not self._pending:
            hits = hits.copy()
            hits[:1] = False
        return self._pending + int(np.argmax(hits)) if hits.any() else -1

    def end_sample(self, file_index: int, line: int, starts: Sequence[int] = ()) -> None:
        """`starts`: places in the sample at which further documents begin, ascending."""
        self._documents.extend(self._offsets[-1] + start for start in starts)
        self._offsets.append(self._offsets[-1] + self._pending)
        self._samples.extend((file_index, line, self._first_target))
        self._pending, self._first_target = 0, -1

    def close(self, meta: dict[str, Any]) -> None:
        """Flushes everything to the disk; `meta.json` is written last."""
        assert self._pending == 0, "a sample was begun and not ended"
        for handle in (self._tokens, self._extra):
            if handle is not None:
                handle.flush()
                os.fsync(handle.fileno())
                handle.close()
        np.save(self.folder / "offsets.npy", np.frombuffer(self._offsets, dtype=np.int64))
        np.save(self.folder / "samples.npy", np.frombuffer(self._samples, dtype=np.int32).reshape(-1, 3))
        np.save(self.folder / "documents.npy", np.array(self._documents, dtype=np.int64))
        body = {
            **meta,
            "format": FORMAT_VERSION,
            "vocab_size": self.vocab_size,
            "targets": self.targets,
            "num_samples": len(self._offsets) - 1,
            "num_tokens": self._offsets[-1],
            "crc32": {p.name: crc32_of(p) for p in sorted(self.folder.iterdir())},
        }
        with open(self.folder / "meta.json", "w", encoding="utf-8") as f:
            json.dump(body, f, indent=1)
            f.flush()
            os.fsync(f.fileno())

    def abort(self) -> None:
        for handle in (self._tokens, self._extra):
            if handle is not None:
                handle.close()


@dataclass(frozen=True)
class TokenStore:
    """A finished store, memory-mapped.

    Attributes:
        tokens: [num_tokens], memory-mapped.
        extra: [num_tokens] mask or labels, None when every token is a target.
        offsets: [num_samples + 1] int64.
        samples: [num_samples, 3]: index of the source file, line (or item) in it, place of the first target or -1.
        documents: int64, ascending: where a document begins inside a sample, not at its start.
    """

    tokens: np.ndarray
    extra: np.ndarray | None
    offsets: np.ndarray
    samples: np.ndarray
    documents: np.ndarray
    meta: dict[str, Any]

    @property
    def num_samples(self) -> int:
        return int(self.offsets.shape[0]) - 1

    def labels(self, start: int, stop: int) -> np.ndarray:
        """[stop - start] int64 labels aligned with the tokens (not shifted), IGNORE_INDEX where there is no target."""
        if self.extra is None:
            return self.tokens[start:stop].astype(np.int64)
        if self.meta["targets"] == "labels":
            return self.extra[start:stop].astype(np.int64)
        return np.where(self.extra[start:stop] != 0, self.tokens[start:stop].astype(np.int64), IGNORE_INDEX)


def open_store(folder: Path) -> TokenStore | None:
    """The store in `folder`, or None where there is none or its files are not what meta.json says was written."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        if meta["format"] != FORMAT_VERSION:
            return None
        if any(crc32_of(folder / name) != value for name, value in meta["crc32"].items()):
            return None
        num_tokens, num_samples = int(meta["num_tokens"]), int(meta["num_samples"])
        tokens = _open_flat(folder / "tokens.bin", token_dtype(meta["vocab_size"]), num_tokens)
        extra = None
        if meta["targets"] != "all":
            name, kind = _TARGET_FILES[meta["targets"]]
            extra = _open_flat(folder / name, np.dtype(kind), num_tokens)
        offsets = np.load(folder / "offsets.npy", mmap_mode="r")
        samples = np.load(folder / "samples.npy", mmap_mode="r")
        documents = np.load(folder / "documents.npy")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if offsets.shape != (num_samples + 1,) or samples.shape != (num_samples, 3) or int(offsets[-1]) != num_tokens:
        return None
    return TokenStore(tokens, extra, offsets, samples, documents, meta)


def _open_flat(path: Path, dtype: np.dtype[Any], count: int) -> np.ndarray:
    if path.stat().st_size != count * dtype.itemsize:
        raise ValueError(f"{path}: not {count} items")
    if count == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,))
