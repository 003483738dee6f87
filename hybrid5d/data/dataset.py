"""A dataset: rows of tokens in a fixed natural order, on top of the token cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hybrid5d.data.cache import cache_key, content_hash, default_cache_dir, open_or_build
from hybrid5d.data.faults import Faults
from hybrid5d.data.options import DataOptions
from hybrid5d.data.sources import SourceFile, resolve_sources
from hybrid5d.data.store import TokenStore
from hybrid5d.data.tokenise import build_store, read_template
from hybrid5d.data.tokenizer import tokenizer_fingerprint
from hybrid5d.data.types import Document, shift_labels
from hybrid5d.errors import DataError

# What of the `data` block decides how a conversation becomes tokens; `chat_template` counts by its text.
CHAT_KEYS = ("messages_key", "prompt_key", "response_key", "instruction_key", "input_key", "output_key", "train_on")


@dataclass(frozen=True)
class DatasetReport:
    """Counts a user should see once, at the start; `notices` are lines on what of the records is not read."""

    files: int
    samples: int
    rows: int
    tokens: int
    truncated: int
    dropped: int
    without_target: int
    tokenised_now: bool
    notices: tuple[str, ...] = ()

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

    def documents(self, row: int) -> tuple[Document, ...]:
        """The documents of row `row`, labels shifted; what lies beyond a document's end is no target of it."""
        start = int(self.starts[row])
        stop = start + int(self.lengths[row])
        inner = self.store.documents[slice(*np.searchsorted(self.store.documents, (start + 1, stop)))]
        edges = [start, *inner.tolist(), stop]
        return tuple(self._document(row, *edge) for edge in pairwise(edges))

    def document(self, row: int) -> Document:
        """The first document of a row: the only one, unless a record says otherwise."""
        return self.documents(row)[0]

    def _document(self, row: int, start: int, stop: int) -> Document:
        ids = self.store.tokens[start:stop].astype(np.int64)
        return Document(input_ids=ids, labels=shift_labels(self.store.labels(start, stop)), row_id=int(row))


def open_dataset(options: DataOptions) -> Dataset:
    """Opens the dataset, tokenising it first unless the cache has it. Raises DataError with every fault found.

    May be called by all ranks at once: one of each machine builds, the others wait for it (`cache.open_or_build`).
    """
    config = options.config
    if config.type == "text" and (options.seq_length is None or options.seq_length < 2):
        raise DataError(f"runner.seq_length={options.seq_length}: data.type=text cuts documents into rows of 2 or more")
    faults = Faults()
    sources = resolve_sources(options.paths, config.type, faults)
    contents = [_hash(s, faults) for s in sources]
    faults.raise_if_any()
    if not sources and not options.allow_empty:
        raise DataError("data.train_data_paths: no file to train on")
    key = cache_key(contents, _recipe(options, sources))
    build: Callable[[Path], None] = lambda folder: build_store(folder, sources, options)  # noqa: E731
    store, built = open_or_build(
        Path(config.cache_dir).expanduser() if config.cache_dir else default_cache_dir(), key, build
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
    config = options.config
    recipe: dict[str, Any] = {
        "type": config.type,
        "vocab_size": options.vocab_size,
        "kinds": [(s.kind, s.lenient) for s in sources],
    }
    if config.type != "tokens":
        recipe["tokenizer"] = tokenizer_fingerprint(options.tokenizer)
    if config.type == "text":
        recipe["text_key"] = config.text_key
    if config.type == "chat":
        recipe["keys"] = {name: getattr(config, name) for name in CHAT_KEYS}
        recipe["template"] = read_template(config.chat_template)
    return recipe


def _rows(store: TokenStore, sources: list[SourceFile], options: DataOptions, built: bool) -> Dataset:
    offsets = np.asarray(store.offsets)
    sizes = np.diff(offsets)
    seq_length = options.seq_length or max(int(sizes.max(initial=0)), 1)
    truncated = dropped = 0
    if options.config.type == "text":
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
        notices=tuple(f"{sources[index].path}: {text}" for index, text in store.meta["notices"]),
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
    if count and options.config.overlong == "error":
        faults = Faults()
        for sample in np.flatnonzero(too_long):
            file, line, _ = store.samples[sample]
            text = f"{sizes[sample]} tokens, more than seq_length={options.seq_length} (data.overlong: error)"
            faults.add(sources[file].path, int(line), text)
        faults.raise_if_any()
    if options.config.overlong == "drop":
        return ~too_long, 0, count
    return np.ones(sizes.shape, bool), count, 0
