"""Errors a user can cause. One line each, collected, raised together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

EXIT_REFUSED = 2  # exit code of every refusal


@dataclass(frozen=True)
class ConfigError:
    """One refused setting: where it is, what it is, which rule it breaks (numbers put in), what would be legal."""

    key: str
    value: Any
    rule: str
    fix: str = ""

    def __str__(self) -> str:
        shown = "" if self.value is None and not self.key else f"={self.value!r}"
        line = f"{self.key}{shown}: {self.rule}" if self.key else self.rule
        return f"{line}. Fix: {self.fix}" if self.fix else line

    def to_dict(self) -> dict[str, Any]:
        return {"key": self.key, "value": self.value, "rule": self.rule, "fix": self.fix}


class HybridError(Exception):
    """Base of every error that is the user's to fix; its text is shown without a traceback."""


class ConfigErrors(HybridError):
    """Every violation found, at once."""

    def __init__(self, errors: Iterable[ConfigError]):
        self.errors: tuple[ConfigError, ...] = tuple(errors)
        super().__init__("\n".join(str(e) for e in self.errors))


class DataError(HybridError):
    """A data file that cannot be used; the text starts with `file:line:` where a line is known."""


class CheckpointError(HybridError):
    """Weights or a checkpoint that cannot be read, written or fitted to the model."""
