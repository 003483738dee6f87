"""Accounts of the fields of records: each one acts, is known to be harmless, or is reported once per file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

HARMLESS = {
    "id", "_id", "idx", "index", "uid", "uuid", "guid", "row_id", "conversation_id", "prompt_id", "source", "source_id",
    "dataset", "dataset_name", "subset", "split", "url", "title", "category", "topic", "lang", "language", "license",
    "date", "time", "timestamp", "created", "created_at", "author", "meta", "metadata", "hash", "length", "num_tokens",
    "token_count", "token_type_ids", "special_tokens_mask",
}  # fmt: skip
# Of a whole record. No fractions: the loss is the mean over the tokens that are learnt, and whether a record of weight
# 0.5 counts whole or half in that mean, formats do not say.
RECORD_WEIGHTS = ("weight", "sample_weight", "loss_weight", "train", "trainable", "training")


class BadRecord(ValueError):
    """A record that cannot be trained on as it says; the text says why."""


class FieldReport:
    """Counts the fields of one file's records that nothing reads.

    Args:
        template: text of the chat template: a field of a message that it names acts.
    """

    def __init__(self, template: str | None = None):
        self.template = template
        self._unread: dict[str, tuple[int, int]] = {}  # name -> (records, line of the first)

    def in_template(self, name: str) -> bool:
        """The template's text holds the name as a word."""
        return self.template is not None and re.search(rf"\b{re.escape(name)}\b", self.template) is not None

    def unread(self, line: int, names: Iterable[str]) -> None:
        """Note what a record has and nothing reads; harmless names are left out."""
        for name in {n for n in names if n.rpartition(".")[2].lower() not in HARMLESS}:
            count, first = self._unread.get(name, (0, line))
            self._unread[name] = (count + 1, first)

    def notices(self) -> list[str]:
        """One line for each field."""
        return [
            f"field {name!r} is not read ({count} record{'s' if count > 1 else ''}, the first in line {first})"
            for name, (count, first) in sorted(self._unread.items())
        ]


def given(record: Mapping[str, Any], name: str) -> bool:
    """A field that is there and says something (Parquet fills what a row lacks with null)."""
    return record.get(name) is not None


def check_weight(record: Mapping[str, Any]) -> None:
    """Weights of a whole record: 1 says nothing; any other would change what the loss is the mean of.

    Raises:
        BadRecord: another weight than 1.
    """
    for name in RECORD_WEIGHTS:
        if given(record, name) and record[name] != 1:
            raise BadRecord(f"{name}={record[name]!r}: records have no weights. Fix: leave it out, or repeat it")


def object_of(record: Any) -> dict[str, Any]:
    """The record as a mapping. Raises BadRecord."""
    if not isinstance(record, dict):
        raise BadRecord(f"a JSON object is expected, not {type(record).__name__}")
    return record


def keys_of(record: Mapping[str, Any]) -> str:
    """Some of a record's keys, for messages."""
    return ", ".join(sorted(map(str, record))[:8]) or "none"
