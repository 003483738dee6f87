"""Records of token ids: masks, padding and the documents inside a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hybrid5d.data.fields import RECORD_WEIGHTS, BadRecord, FieldReport, check_weight, given, keys_of, object_of
from hybrid5d.data.types import IGNORE_INDEX, outside_vocabulary

TARGET_MASKS = ("loss_mask", "completion_mask", "assistant_masks", "assistant_mask", "assistant_tokens_mask")
LENGTHS = ("seq_lens", "seq_lengths")
READ = {"input_ids", "labels", "attention_mask", "position_ids", *RECORD_WEIGHTS, *TARGET_MASKS, *LENGTHS}


@dataclass(frozen=True)
class TokenRow:
    """One row of tokens.

    Attributes:
        ids, labels: [n] int64, aligned; IGNORE_INDEX where there is no target.
        starts: where the row's further documents begin (none for a row of one).
    """

    ids: np.ndarray
    labels: np.ndarray
    starts: tuple[int, ...] = ()


def parse_tokens(record: Any, vocab_size: int, report: FieldReport, line: int) -> TokenRow:
    """A token record, checked; labels are the ids where it has none. What nothing reads goes to the report.

    attention_mask: padding at either end is cut off. loss_mask, completion_mask, assistant_masks (aligned with the
    ids): 0 is no target. position_ids that start again at 0, and seq_lens: several documents, which do not see each
    other.

    Raises:
        BadRecord: what is missing, has another length, lies outside the vocabulary, or cannot be honoured.
    """
    record = object_of(record)
    if "input_ids" not in record:
        raise BadRecord(f"no key 'input_ids'; its keys: {keys_of(record)}")
    check_weight(record)
    ids = _integers(record["input_ids"], "input_ids")
    if not ids.size:
        raise BadRecord("input_ids is empty")
    _check_range(ids, "input_ids", vocab_size)
    labels = ids
    if given(record, "labels"):
        labels = _aligned(record, "labels", ids.size)
        _check_range(labels, "labels", vocab_size)
    for name in TARGET_MASKS:
        if given(record, name):
            labels = np.where(_mask(record, name, ids.size), labels, IGNORE_INDEX)
    kept = _kept(record, ids.size)
    starts = _documents(record, kept, ids.size)
    if starts:
        labels = labels.copy()
        labels[kept][list(starts)] = IGNORE_INDEX  # a document's first token is nobody's target
    report.unread(line, [name for name in record if name not in READ and given(record, name)])
    return TokenRow(ids[kept], labels[kept], starts)


def _kept(record: dict[str, Any], size: int) -> slice:
    """What is left without the padding that attention_mask marks."""
    if not given(record, "attention_mask"):
        return slice(0, size)
    places = np.flatnonzero(_mask(record, "attention_mask", size))
    if not places.size:
        raise BadRecord("attention_mask is all 0: the row holds nothing but padding")
    kept = slice(int(places[0]), int(places[-1]) + 1)
    if places.size != kept.stop - kept.start:
        hole = int(places[0] + np.argmax(np.diff(places) > 1) + 1)
        raise BadRecord(f"attention_mask[{hole}]=0 between tokens: only padding at the ends can be left out")
    return kept


def _documents(record: dict[str, Any], kept: slice, num_ids: int) -> tuple[int, ...]:
    """Starts of the row's documents after its first, by position_ids and by lengths, which must agree."""
    size, result = kept.stop - kept.start, []
    if given(record, "position_ids"):
        positions = _aligned(record, "position_ids", num_ids)
        result.append(("position_ids", _starts_of(positions[kept])))
    for name in LENGTHS:
        if given(record, name):
            lengths = _integers(record[name], name)
            if not lengths.size or lengths.min() < 1 or int(lengths.sum()) != size:
                raise BadRecord(f"{name} must be lengths of 1 or more that add up to the row's {size} tokens")
            result.append((name, tuple(np.cumsum(lengths)[:-1].tolist())))
    if len({starts for _, starts in result}) > 1:
        raise BadRecord(f"{result[0][0]} and {result[1][0]} cut the row into different documents")
    return result[0][1] if result else ()


def _starts_of(positions: np.ndarray) -> tuple[int, ...]:
    starts = np.flatnonzero(positions == 0)
    expected = np.arange(positions.size)
    if starts.size and starts[0] == 0:
        expected = expected - np.repeat(starts, np.diff([*starts, positions.size]))
    if not np.array_equal(positions, expected):
        place = int(np.argmax(positions != expected))
        raise BadRecord(f"position_ids[{place}]={positions[place]}: positions count from 0 in each document of the row")
    return tuple(starts[1:].tolist())


def _aligned(record: dict[str, Any], name: str, size: int) -> np.ndarray:
    values = _integers(record[name], name)
    if values.size != size:
        raise BadRecord(f"{values.size} {name} for {size} input_ids: they must be aligned one to one")
    return values


def _mask(record: dict[str, Any], name: str, size: int) -> np.ndarray:
    value = record[name]
    if isinstance(value, list):  # true and 1.0 are 1
        value = [int(v) if isinstance(v, (bool, float)) and v in (0, 1) else v for v in value]
    mask = _aligned({name: value}, name, size)
    wrong = (mask != 0) & (mask != 1)
    if wrong.any():
        place = int(np.argmax(wrong))
        raise BadRecord(f"{name}[{place}]={mask[place]} is neither 0 nor 1")
    return mask.astype(bool)


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
