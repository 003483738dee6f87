"""A dataset: rows of tokens in a fixed natural order, on top of the token cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hybrid5d.data.cache import cache_key, content_hash, default_cache_dir, open_or_build
from hybrid5d.data.chat import ChatKeys, TrainOn
from hybrid5d.data.faults import Faults
from hybrid5d.data.sources import SourceFile, resolve_sources
from hybrid5d.data.store import TokenStore
from hybrid5d.data.tokenise import build_store, read_template
from hybrid5d.data.tokenizer import BYTES, tokenizer_fingerprint
from hybrid5d.data.types import Document, shift_labels
from hybrid5d.errors import DataError

Overlong = Literal["truncate", "drop", "error"]


@dataclass(frozen=True)
class DataOptions:
    """What to read and how samples are made of it.

    Attributes:
        type: text (files are documents), tokens (rows of ids) or chat (conversations).
        paths: files, folders, globs, `stdlib`; see `sources.resolve_sources`.
        seq_length: most tokens of a row; None: the longest sample's (not for text, whose documents it cuts).
        vocab_size: of the model; every id must be below it.
        tokenizer: an HF folder, or `byte`. Unused for tokens.
        overlong: what happens to a tokens or chat sample above seq_length. Documents of text are cut into rows instead.
        num_workers: processes that tokenise; 0: two threads of the caller, and the tokenizer's own.
        allow_empty: no row at all is no fault (evaluation).
    """

    type: str
    paths: tuple[str, ...]
    seq_length: int | None
    vocab_size: int
    tokenizer: str = BYTES
    overlong: Overlong = "truncate"
    train_on: TrainOn = "assistant"
    chat_keys: ChatKeys = field(default_factory=ChatKeys)
    text_key: str = "text"
    chat_template: str | None = None
    cache_dir: str | None = None
    num_workers: int = 0
    allow_empty: bool = False


@dataclass(frozen=True)
class DatasetReport:
    """Counts a user should see once, at the start."""

    files: int
    samples: int
    rows: int
    tokens: int
    truncated: int
    dropped: int
    without_target: int
    tokenised_now: bool

    def __str__(self) -> str:
        parts = [f"{self.rows} rows, {self.tokens} tokens of {self.samples} samples in {self.files} files"]
        if self.truncated:
            parts.append(f"{self.truncated} samples longer than seq_length truncated")
        if self.dropped:
            parts.append(f"{self.dropped} samples longer than seq_length dropped")
        if self.without_target:
            parts.append(f"{self.without_target} rows without any target")
        parts.append("tokenised now" if self.tokenised_now else "tokens from the cache")
        return "; ".join(parts)


@dataclass(frozen=True)
class Dataset:
    """Rows in natural order: row i is `lengths[i]` tokens of the store from `starts[i]` on."""

    store: TokenStore
    starts: np.ndarray
    lengths: np.ndarray
    seq_length: int
    report: DatasetReport

    def __len__(self) -> int:
        return int(self.lengths.shape[0])

    def document(self, row: int) -> Document:
        """Row `row` with its labels shifted; what lies beyond the row's end is no target of it."""
        start = int(self.starts[row])
        stop = start + int(self.lengths[row])
        ids = self.store.tokens[start:stop].astype(np.int64)
        return Document(input_ids=ids, labels=shift_labels(self.store.labels(start, stop)), row_id=int(row))


def open_dataset(options: DataOptions) -> Dataset:
    """Opens the dataset, tokenising it first unless the cache has it. Raises DataError with every fault found.

    May be called by all ranks at once: one of each machine builds, the others wait for it (`cache.open_or_build`).
    """
    if options.type == "text" and (options.seq_length is None or options.seq_length < 2):
        raise DataError(f"runner.seq_length={options.seq_length}: data.type=text cuts documents into rows of 2 or more")
    faults = Faults()
    sources = resolve_sources(options.paths, options.type, faults)
    contents = [_hash(s, faults) for s in sources]
    faults.raise_if_any()
    if not sources and not options.allow_empty:
        raise DataError("data.train_data_paths: no file to train on")
    key = cache_key(contents, _recipe(options, sources))
    build: Callable[[Path], None] = lambda folder: build_store(folder, sources, options)  # noqa: E731
    store, built = open_or_build(
        Path(options.cache_dir).expanduser() if options.cache_dir else default_cache_dir(), key, build
    )
    return _rows(store, sources, options, built)


def _hash(source: SourceFile, faults: Faults) -> str:
    try:
        return content_hash(source.path)
    except OSError as e:
        faults.add(source.path, None, f"cannot be read: {e.strerror or e}")
        return ""


def _recipe(options: DataOptions, sources: list[SourceFile]) -> dict[str, Any]:
    """All that decides the tokens, besides the files' contents."""
    recipe: dict[str, Any] = {
        "type": options.type,
        "vocab_size": options.vocab_size,
        "kinds": [(s.kind, s.lenient) for s in sources],
    }
    if options.type != "tokens":
        recipe["tokenizer"] = tokenizer_fingerprint(options.tokenizer)
    if options.type == "text":
        recipe["text_key"] = options.text_key
    if options.type == "chat":
        recipe["keys"] = asdict(options.chat_keys)
        recipe["train_on"] = options.train_on
        recipe["template"] = read_template(options.chat_template)
    return recipe


def _rows(store: TokenStore, sources: list[SourceFile], options: DataOptions, built: bool) -> Dataset:
    offsets = np.asarray(store.offsets)
    sizes = np.diff(offsets)
    seq_length = options.seq_length or max(int(sizes.max(initial=0)), 1)
    truncated = dropped = 0
    if options.type == "text":
        starts, lengths = _chunks(offsets[:-1], sizes, seq_length)
        without_target = 0
    else:
        kept, truncated, dropped = _fit(store, sizes, sources, replace(options, seq_length=seq_length))
        starts, lengths = offsets[:-1][kept], np.minimum(sizes[kept], seq_length)
        first_target = np.asarray(store.samples[:, 2])[kept]
        without_target = int(((first_target < 0) | (first_target >= lengths)).sum())
    if not len(lengths) and not options.allow_empty:
        counts = f"samples: {store.num_samples}, dropped as too long: {dropped}"
        raise DataError(f"{', '.join(options.paths)}: no row to train on ({counts})")
    if not options.allow_empty and without_target == len(lengths):
        raise DataError(
            f"{', '.join(options.paths)}: none of the {len(lengths)} rows has a token to learn"
            f" ({truncated} truncated to seq_length={seq_length}). Fix: a longer runner.seq_length, or other data"
        )
    report = DatasetReport(
        files=len(sources),
        samples=store.num_samples,
        rows=len(lengths),
        tokens=int(lengths.sum()),
        truncated=truncated,
        dropped=dropped,
        without_target=without_target,
        tokenised_now=built,
    )
    return Dataset(store, starts, lengths, seq_length, report)


def _chunks(starts: np.ndarray, sizes: np.ndarray, seq_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of each document: contiguous tokens, the last token of a row again as the first of the next.

    With that overlap of one, each token but a document's first is a target exactly once. A row never crosses from one
    document into another; the last of a document may be shorter.
    """
    stride = seq_length - 1
    counts = np.where(sizes >= 2, -(-(sizes - 1) // stride), 0)
    document = np.repeat(np.arange(sizes.size), counts)
    place = np.arange(document.size) - np.repeat(np.cumsum(counts) - counts, counts)
    lengths = np.minimum(seq_length, sizes[document] - place * stride)
    return starts[document] + place * stride, lengths


def _fit(
    store: TokenStore, sizes: np.ndarray, sources: list[SourceFile], options: DataOptions
) -> tuple[np.ndarray, int, int]:
    """(kept [n] bool, truncated, dropped): samples that remain. Raises DataError for `overlong: error`."""
    assert options.seq_length is not None
    too_long = sizes > options.seq_length
    count = int(too_long.sum())
    if count and options.overlong == "error":
        faults = Faults()
        for sample in np.flatnonzero(too_long):
            file, line, _ = store.samples[sample]
            text = f"{sizes[sample]} tokens, more than seq_length={options.seq_length} (data.overlong: error)"
            faults.add(sources[file].path, int(line), text)
        faults.raise_if_any()
    if options.overlong == "drop":
        return ~too_long, 0, count
    return np.ones(sizes.shape, bool), count, 0
