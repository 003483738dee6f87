"""Errors a user can cause. One line each, collected, raised together.

All of them in one start, also where the YAML itself has faults. A key whose value cannot be used (wrong type or range,
a reference that dangles, a key that an unknown one may have meant) is *spoilt*: it becomes a hole in the config that
later rules read (`RunConfig.without`), and a rule that reads a hole is left out (`judged`). So a later fault that is
told holds whatever the spoilt keys are mended to; no default stands in for what the user wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
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


class SpoiltKey(Exception):
    """A key without a usable value was read, so nothing that depends on it can be judged. Never reaches the user."""


def judged(rules: Iterable[Callable[..., list[ConfigError]]], *args: Any) -> list[ConfigError]:
    """What each rule finds; a rule that reads a spoilt key is left out whole."""
    errors: list[ConfigError] = []
    for rule in rules:
        with suppress(SpoiltKey):
            errors += rule(*args)
    return errors


def best_effort(find: Callable[[], list[ConfigError]]) -> list[ConfigError]:
    """What `find` finds in a file that is refused already: a failure of ours there must not hide why it is refused."""
    try:
        return find()
    except Exception as exc:  # a file without faults meets the same code without this
        rule = f"the rules beyond these lines could not be checked ({type(exc).__name__}: {' '.join(str(exc).split())})"
        return [ConfigError("", None, rule, "repair what the other lines name, and start again")]


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
