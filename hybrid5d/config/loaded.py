"""What reading a YAML leaves behind: the config, its faults, and what became of each key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hybrid5d.config.schema import RunConfig
from hybrid5d.errors import ConfigError


@dataclass
class KeyReport:
    """What loading made of each key of the input: the raw material of `convert`'s report."""

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
    invalid: set[str] = field(default_factory=set)  # keys and blocks without a usable value (`hybrid5d.errors`)
    run_faults: list[ConfigError] = field(default_factory=list)  # of a run; a translation may go on
    foreign: bool = False  # another program's YAML, to be translated

    def notice(self, text: str) -> None:
        """Add a notice once."""
        if text not in self.notices:
            self.notices.append(text)


@dataclass
class LoadedYaml:
    """A file read as far as it goes."""

    keys: KeyReport
    config: RunConfig | None = None  # defaults where `keys.invalid`; None: no run at all, no further rule makes sense
    errors: list[ConfigError] = field(default_factory=list)
