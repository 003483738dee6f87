"""Samples of every data type -> a token store, in one streaming pass, all faults reported together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid5d.data.chat import BadRecord, ChatEncoder, Message, TrainOn, to_messages
from hybrid5d.data.chat_mask import TemplateError
from hybrid5d.data.faults import Faults
from hybrid5d.data.sources import SourceFile, read_records
from hybrid5d.data.store import StoreWriter
from hybrid5d.data.tokenizer import load_tokenizer
from hybrid5d.data.types import outside_vocabulary
from hybrid5d.data.workers import encode_batches
from hybrid5d.errors import DataError

if TYPE_CHECKING:
    from hybrid5d.data.dataset import DataOptions

_PIECE = 1 << 20  # characters of a document that are tokenised at once
_BATCH_SAMPLES = 250  # small enough that a few thousand samples keep several processes busy
_BATCH_CHARACTERS = 1 << 20


def build_store(folder: Path, sources: list[SourceFile], options: DataOptions) -> None:
    """Fills `folder` with the store of `sources`. Raises DataError listing the faults of all files."""
    faults = Faults()
    targets = {"text": "all", "chat": "mask", "tokens": "labels"}[options.type]
    writer = StoreWriter(folder, vocab_size=options.vocab_size, targets=targets)  # type: ignore[arg-type]
    try:
        if options.type == "text":
            _write_text(writer, sources, options, faults)
        elif options.type == "chat":
            _write_chat(writer, sources, options, faults)
        else:
            _write_tokens(writer, sources, options, faults)
        faults.raise_if_any()
        writer.close({"files": [str(s.path) for s in sources]})
    finally:
        writer.abort()


def batched(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Lists of up to `size` items."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


# --- tokens -----------------------------------------------------------------------------------------------------------


def _write_tokens(writer: StoreWriter, sources: list[SourceFile], options: DataOptions, faults: Faults) -> None:
    for index, source in enumerate(sources):
        for line, record in read_records(_named(source, options), faults):
            try:
                ids, labels = parse_tokens(record, options.vocab_size)
            except BadRecord as e:
                faults.add(source.path, line, str(e))
                continue
            if not faults:
                writer.append(ids, labels)
                writer.end_sample(index, line)


def parse_tokens(record: Any, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(input_ids, labels), both [n] int64 and checked; labels are the ids where the record has none."""
    if not isinstance(record, dict):
        raise BadRecord(f"a JSON object is expected, not {type(record).__name__}")
    if "input_ids" not in record:
        raise BadRecord(f"no key 'input_ids'; its keys: {', '.join(sorted(map(str, record))[:8]) or 'none'}")
    ids = _integers(record["input_ids"], "input_ids")
    if not ids.size:
        raise BadRecord("input_ids is empty")
    _check_range(ids, "input_ids", vocab_size)
    if record.get("labels") is None:
        return ids, ids
    labels = _integers(record["labels"], "labels")
    if labels.shape != ids.shape:
        raise BadRecord(f"{labels.size} labels for {ids.size} input_ids: they must be aligned one to one")
    _check_range(labels, "labels", vocab_size)
    return ids, labels


def _integers(value: Any, name: str) -> np.ndarray:
    if not isinstance(value, list):
        raise BadRecord(f"{name} must be a list of integers, not {type(value).__name__}")
    for place, item in enumerate(value):
        if type(item) is not int:
            raise BadRecord(f"{name}[{place}]={item!r} is not an integer")
    try:
        return np.array(value, dtype=np.int64)
    except OverflowError:
        raise BadRecord(f"{name} holds a number beyond 64 bits") from None


def _check_range(values: np.ndarray, key: str, vocab_size: int) -> None:
    fault = outside_vocabulary(key, values, vocab_size)
    if fault:
        raise BadRecord(fault)


# --- text -------------------------------------------------------------------------------------------------------------


def _write_text(writer: StoreWriter, sources: list[SourceFile], options: DataOptions, faults: Faults) -> None:
    """Each document: bos (where the tokenizer puts it before texts), its tokens, eos (where there is one)."""
    tokenizer = load_tokenizer(options.tokenizer, model_vocab_size=options.vocab_size)
    batches = _by_size(_pieces(sources, options, faults))
    # once there is a fault nothing will be kept: the rest is only read, for more faults
    texts = (([text for text, _, _, _ in batch], batch) for batch in batches if not faults)
    for encoded, batch in encode_batches(tokenizer.encode_batch, texts, options.num_workers):
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


def _pieces(sources: list[SourceFile], options: DataOptions, faults: Faults) -> Iterator[Piece]:
    for index, source in enumerate(sources):
        if source.kind == "text":
            yield from _file_pieces(source, index, options, faults)
            continue
        for line, record in read_records(_named(source, options), faults):
            text = record.get(options.text_key) if isinstance(record, dict) else None
            if not isinstance(text, str):
                faults.add(source.path, line, f"no string under {options.text_key!r} (data.text_key)")
            elif text:
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


def _write_chat(writer: StoreWriter, sources: list[SourceFile], options: DataOptions, faults: Faults) -> None:
    template = read_template(options.chat_template)
    encoder = _chat_encoder(options.tokenizer, options.vocab_size, template, options.train_on)
    batches = batched(_conversations(sources, options, faults), _BATCH_SAMPLES)
    conversations = (([messages for messages, _, _ in batch], batch) for batch in batches if not faults)
    for encoded, batch in encode_batches(encoder.encode, conversations, options.num_workers):
        for result, (_, index, line) in zip(encoded, batch):
            if isinstance(result, BadRecord):
                faults.add(sources[index].path, line, str(result))
            elif not faults:
                writer.append(*result)
                writer.end_sample(index, line)


def _chat_encoder(tokenizer: str, vocab_size: int, template: str | None, train_on: TrainOn) -> ChatEncoder:
    try:
        loaded = load_tokenizer(tokenizer, model_vocab_size=vocab_size, chat_template=template)
        return ChatEncoder(loaded, train_on)
    except TemplateError as e:
        raise DataError(f"{tokenizer}: {e}") from e


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
    sources: list[SourceFile], options: DataOptions, faults: Faults
) -> Iterator[tuple[list[Message], int, int]]:
    for index, source in enumerate(sources):
        for line, record in read_records(_named(source, options), faults):
            try:
                yield to_messages(record, options.chat_keys), index, line
            except BadRecord as e:
                faults.add(source.path, line, str(e))


def _named(source: SourceFile, options: DataOptions) -> SourceFile:
    """An empty file is a fault where the user named it, except in data that may be empty."""
    if not options.allow_empty:
        return source
    return SourceFile(source.path, source.kind, named=False, lenient=source.lenient)
