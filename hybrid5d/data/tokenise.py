"""Samples of every data type -> a token store, in one streaming pass, all faults reported together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from hybrid5d.data.chat import ChatEncoder
from hybrid5d.data.chat_mask import TemplateError
from hybrid5d.data.conversations import Conversation, to_conversation
from hybrid5d.data.faults import Faults
from hybrid5d.data.fields import RECORD_WEIGHTS, BadRecord, FieldReport, check_weight, given
from hybrid5d.data.options import DataOptions
from hybrid5d.data.sources import SourceFile, read_records
from hybrid5d.data.store import StoreWriter, Targets
from hybrid5d.data.token_records import parse_tokens
from hybrid5d.data.tokenizer import load_tokenizer
from hybrid5d.data.workers import encode_batches
from hybrid5d.errors import DataError

TARGETS: dict[str, Targets] = {"text": "all", "chat": "mask", "tokens": "labels"}  # by data.type
_PIECE = 1 << 20  # characters of a document that are tokenised at once
_BATCH_SAMPLES = 250  # small enough that a few thousand samples keep several processes busy
_BATCH_CHARACTERS = 1 << 20


def build_store(folder: Path, sources: list[SourceFile], options: DataOptions) -> None:
    """Fills `folder` with the store of `sources`. Raises DataError listing the faults of all files."""
    faults = Faults()
    kind = options.config.type
    template = read_template(options.config.chat_template) if kind == "chat" else None
    writer = StoreWriter(folder, vocab_size=options.vocab_size, targets=TARGETS[kind])
    try:
        if kind == "text":
            reports = [FieldReport() for _ in sources]
            _write_text(writer, sources, options, faults, reports)
        elif kind == "chat":
            encoder = _chat_encoder(options, template)
            reports = [FieldReport(getattr(encoder.tokenizer, "template", None)) for _ in sources]
            _write_chat(writer, sources, options, faults, reports, encoder)
        else:
            reports = [FieldReport() for _ in sources]
            _write_tokens(writer, sources, options, faults, reports)
        faults.raise_if_any()
        writer.close({"notices": [[i, text] for i, report in enumerate(reports) for text in report.notices()]})
    finally:
        writer.abort()


def batched(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Lists of up to `size` items."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


# --- tokens -----------------------------------------------------------------------------------------------------------


def _write_tokens(
    writer: StoreWriter, sources: list[SourceFile], options: DataOptions, faults: Faults, reports: list[FieldReport]
) -> None:
    for index, source in enumerate(sources):
        for line, record in read_records(_named(source, options), faults):
            try:
                row = parse_tokens(record, options.vocab_size, reports[index], line)
            except BadRecord as e:
                faults.add(source.path, line, str(e))
                continue
            if not faults:
                writer.append(row.ids, row.labels)
                writer.end_sample(index, line, row.starts)


# --- text -------------------------------------------------------------------------------------------------------------


def _write_text(
    writer: StoreWriter, sources: list[SourceFile], options: DataOptions, faults: Faults, reports: list[FieldReport]
) -> None:
    """Each document: bos (where the tokenizer puts it before texts), its tokens, eos (where there is one)."""
    tokenizer = load_tokenizer(options.tokenizer, model_vocab_size=options.vocab_size)
    batches = _by_size(_pieces(sources, options, faults, reports))
    # once there is a fault nothing will be kept: the rest is only read, for more faults
    texts = (([text for text, _, _, _ in batch], batch) for batch in batches if not faults)
    for encoded, batch in encode_batches(tokenizer.encode_batch, texts, options.config.num_workers):
        for ids, (_, first, last, origin) in zip(encoded, batch):
            if first and tokenizer.bos_id is not None:
                writer.append(np.array([tokenizer.bos_id]))
            writer.append(ids)
            if last:
                if tokenizer.eos_id is not None:
                    writer.append(np.array([tokenizer.eos_id]))
                writer.end_sample(*origin)


Piece = tuple[str, bool, bool, tuple[int, int]]  # text, first of its document, last of it, (file index, line)


def _by_size(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Batches of bounded size, so that memory does not grow with a document or a corpus."""
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece[0])
        if len(batch) >= _BATCH_SAMPLES or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _pieces(
    sources: list[SourceFile], options: DataOptions, faults: Faults, reports: list[FieldReport]
) -> Iterator[Piece]:
    key = options.config.text_key
    for index, source in enumerate(sources):
        if source.kind == "text":
            yield from _file_pieces(source, index, options, faults)
            continue
        for line, record in read_records(_named(source, options), faults):
            text = record.get(key) if isinstance(record, dict) else None
            if not isinstance(text, str):
                faults.add(source.path, line, f"no string under {key!r} (data.text_key)")
                continue
            try:
                check_weight(record)
            except BadRecord as e:
                faults.add(source.path, line, str(e))
                continue
            reports[index].unread(line, [n for n in record if n not in (key, *RECORD_WEIGHTS) and given(record, n)])
            if text:
                parts = list(_cut(text))
                for i, part in enumerate(parts):
                    yield part, i == 0, i == len(parts) - 1, (index, line)


def _cut(text: str) -> Iterator[str]:
    """Long documents in pieces that end with a line where there is one, as a tokenizer rarely joins across it."""
    place = 0
    while len(text) - place > _PIECE:
        end = text.rfind("\n", place, place + _PIECE) + 1 or place + _PIECE
        yield text[place:end]
        place = end
    yield text[place:]


def _file_pieces(source: SourceFile, index: int, options: DataOptions, faults: Faults) -> Iterator[Piece]:
    """The pieces of a plain file, read a block at a time; line ends are kept as they are."""
    origin = (index, 1)
    pending, first = "", True
    try:
        if source.path.stat().st_size == 0:
            if source.named and not options.allow_empty:
                faults.add(source.path, None, "the file is empty (0 bytes)")
            return
        with open(source.path, encoding="utf-8-sig", newline="") as f:  # a mark at the start is no text
            while block := f.read(_PIECE):
                pending += block
                cut = pending.rfind("\n") + 1
                if not cut and len(pending) > 4 * _PIECE:
                    cut = len(pending)
                if cut and len(block) == _PIECE:
                    yield pending[:cut], first, False, origin
                    pending, first = pending[cut:], False
    except UnicodeDecodeError as e:
        if not source.lenient:
            faults.add(source.path, *_where_not_utf8(source.path, e))
        elif not first:  # a begun document must be ended
            yield "", False, True, origin
        return
    except OSError as e:
        faults.add(source.path, None, f"cannot be read: {e.strerror or e}")
        return
    yield pending, first, True, origin


def _where_not_utf8(path: Path, error: UnicodeDecodeError) -> tuple[int | None, str]:
    """(line, text) of the first byte that is not UTF-8: the decoder knows its place in a block only."""
    with open(path, "rb") as f:
        for number, raw in enumerate(f, start=1):
            try:
                raw.decode("utf-8")
            except UnicodeDecodeError as e:
                return number, f"not UTF-8: byte 0x{raw[e.start]:02x} at position {e.start} of the line"
    return None, f"not UTF-8: {error.reason}"


# --- chat -------------------------------------------------------------------------------------------------------------


def _write_chat(
    writer: StoreWriter, sources: list[SourceFile], options: DataOptions, faults: Faults, reports: list[FieldReport],
    encoder: ChatEncoder,
) -> None:  # fmt: skip
    batches = batched(_conversations(sources, options, faults, reports), _BATCH_SAMPLES)
    conversations = (([c for c, _, _ in batch], batch) for batch in batches if not faults)
    for encoded, batch in encode_batches(encoder.encode, conversations, options.config.num_workers):
        for result, (_, index, line) in zip(encoded, batch):
            if isinstance(result, BadRecord):
                faults.add(sources[index].path, line, str(result))
            elif not faults:
                writer.append(*result)
                writer.end_sample(index, line)


def _chat_encoder(options: DataOptions, template: str | None) -> ChatEncoder:
    try:
        loaded = load_tokenizer(options.tokenizer, model_vocab_size=options.vocab_size, chat_template=template)
        return ChatEncoder(loaded, options.config.train_on)
    except TemplateError as e:
        raise DataError(f"{options.tokenizer}: {e}") from e


def read_template(path: str | None) -> str | None:
    """The text of `data.chat_template`. Raises DataError."""
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror or e if isinstance(e, OSError) else e
        raise DataError(f"{path}: data.chat_template cannot be read: {reason}") from e


def _conversations(
    sources: list[SourceFile], options: DataOptions, faults: Faults, reports: list[FieldReport]
) -> Iterator[tuple[Conversation, int, int]]:
    for index, source in enumerate(sources):
        for line, record in read_records(_named(source, options), faults):
            try:
                yield to_conversation(record, options.config, reports[index], line), index, line
            except BadRecord as e:
                faults.add(source.path, line, str(e))


def _named(source: SourceFile, options: DataOptions) -> SourceFile:
    """An empty file is a fault where the user named it, except in data that may be empty."""
    if not options.allow_empty:
        return source
    return SourceFile(source.path, source.kind, named=False, lenient=source.lenient)
