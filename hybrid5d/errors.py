"""Errors a user can cause. One line each, collected, raised together.

All of them in one start, also where the YAML itself has faults: a `Rule` says which keys it reads, and one that reads a
key without a usable value (wrong type or range, a reference that dangles, a key that an unknown one may have meant) is
left out. So a later fault that is reported holds whatever the invalid keys are mended to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

EXIT_FAILED = 1
EXIT_REFUSED = 2  # exit code of every refusal
EXIT_STOPPED = 3  # stopped on request; everything is saved
Subject = TypeVar("Subject")


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


@dataclass(frozen=True)
class Rule(Generic[Subject]):
    """A check and the keys that decide it; `reads` may name whole blocks."""

    check: Callable[[Subject], list[ConfigError]]
    reads: tuple[str, ...]


def reads(*keys: str) -> Callable[[Callable[[Subject], list[ConfigError]]], Rule[Subject]]:
    """Makes a `Rule` of a function."""
    return lambda check: Rule(check, keys)


def run_rules(rules: Iterable[Rule[Subject]], subject: Subject, unknown: Collection[str] = ()) -> list[ConfigError]:
    """Every violation, in the order of the rules; those that read one of the `unknown` keys are left out."""
    return [error for rule in rules if not touches(rule.reads, unknown) for error in rule.check(subject)]


def touches(keys: Iterable[str], others: Collection[str]) -> bool:
    """True where a key equals one of `others`, lies in it, or holds it."""
    return any(k == o or k.startswith(f"{o}.") or o.startswith(f"{k}.") for k in keys for o in others)


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


class DamagedCheckpoint(CheckpointError):
    """A checkpoint whose files have the right sizes and other content than was written. Nothing was overwritten."""
