"""Where each value of a config comes from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hybrid5d.config import tree as trees
from hybrid5d.config.classify import owner
from hybrid5d.config.loaded import KeyReport
from hybrid5d.config.schema import RunConfig, schema_keys
from hybrid5d.errors import touches


@dataclass(frozen=True)
class Sourced:
    """A key of the schema, its value in force, and who said so (a file, a word of the command line, `default`)."""

    key: str
    value: Any
    source: str


def sourced(config: RunConfig, keys: KeyReport) -> Iterator[Sourced]:
    """Every key of the schema, in its order."""
    tree, defaults = config.to_tree(), RunConfig().to_tree()
    filled = {target: key for key, target in keys.aliases.items()}
    owned = {owner(path) for path in keys.owned}
    for key in schema_keys():
        value = trees.get(tree, key)
        yield Sourced(key, value, _source(key, value == trees.get(defaults, key), keys, owned, filled))


def _source(key: str, is_default: bool, keys: KeyReport, owned: set[str | None], filled: dict[str, str]) -> str:
    if touches((key,), keys.command_line):
        return "command line"
    if key in owned:
        written = trees.get(keys.raw, key)
        reference = f", written {written}" if isinstance(written, str) and "${" in written else ""
        return f"{keys.path}{_named(len(keys.files) - 1)}{reference}"
    if key in filled:
        return f"{filled[key]} in {keys.path}"
    return "default" if is_default else f"follows from other keys of {keys.path}"


def _named(more: int) -> str:
    """Files that a file is composed of: which of them holds a key is not kept."""
    return "" if more < 1 else " or the file that it names" if more == 1 else f" or the {more} files that it names"
