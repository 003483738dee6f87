"""What became of each key of the input while loading: the raw material of `convert`'s report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hybrid5d.errors import ConfigError


@dataclass
class Account:
    """Filled by `config.load`; read by `plan.translate` and by notices."""

    path: str = ""
    files: tuple[str, ...] = ()
    tree: dict[str, Any] = field(default_factory=dict)  # composed, overridden, resolved
    raw: dict[str, Any] = field(default_factory=dict)  # before references were resolved
    owned: dict[str, Any] = field(default_factory=dict)  # input keys that the schema knows
    dropped: dict[str, tuple[Any, str]] = field(default_factory=dict)  # key -> (value, why)
    overridden: dict[str, tuple[Any, str]] = field(default_factory=dict)  # key -> (value, by what)
    command_line: dict[str, str] = field(default_factory=dict)
    dangling: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)  # input key -> the key it fills
    notices: list[str] = field(default_factory=list)
    spoilt: set[str] = field(default_factory=set)  # keys and blocks whose value is not known (`config.errors`)
    foreign: bool = False  # RLinf's shape, to be translated

    def tell(self, notice: str) -> None:
        """Add a notice once."""
        if notice not in self.notices:
            self.notices.append(notice)


@dataclass
class Document:
    """A file read as far as it goes: the config where it is valid, and every fault."""

    account: Account
    config: Any = None  # RunConfig | None
    judged: Any = None  # RunConfig | None: with a hole for each spoilt key; what further rules read
    errors: list[ConfigError] = field(default_factory=list)
    fatal: bool = False  # no further rule makes sense (not a training run at all)
