"""From a YAML file (and command-line words) to a validated `RunConfig`.

Native files need nothing else. Another program's are read through a `Dialect`, which says how files are composed, what
its keys are to us, and what must be refused or heard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hybrid5d.config import tree as trees
from hybrid5d.config.classify import Classifier, meant, owner
from hybrid5d.config.loaded import KeyReport, LoadedYaml
from hybrid5d.config.overrides import Override, apply_overrides, parse_overrides
from hybrid5d.config.resolve import dependents, resolve
from hybrid5d.config.schema import RunConfig, block_of, schema_keys
from hybrid5d.config.yaml_file import read_mapping
from hybrid5d.errors import ConfigError, ConfigErrors, best_effort

MAX_ERRORS = 200


@dataclass
class Composition:
    """The tree of one or more files, references unresolved."""

    tree: dict[str, Any]
    files: tuple[str, ...] = ()
    errors: list[ConfigError] = field(default_factory=list)
    readings: list[str] = field(default_factory=list)  # notices of `parse_yaml`
    choices: set[str] = field(default_factory=set)  # command-line words that chose a file
    dropped: dict[str, tuple[Any, str]] = field(default_factory=dict)


class Dialect:
    """How a YAML is read; this one: ours."""

    def compose(self, path: Path, choices: Mapping[str, str | None]) -> Composition:
        """The tree of a file. `choices`: command-line words that may choose what is composed.

        Raises:
            ConfigErrors: the file cannot be read.
        """
        readings: list[str] = []
        return Composition(read_mapping(path, readings=readings), (str(path),), readings=readings)

    def not_a_run(self, tree: dict[str, Any]) -> ConfigError | None:
        """The one reason why a file cannot be a training run at all, or None."""
        return None if tree else ConfigError("", None, "the file is empty", "give a run's YAML")

    def classifier(self, keys: KeyReport) -> Classifier:
        """Sorts the keys."""
        return Classifier(keys)

    def fill(self, owned: dict[str, Any], keys: KeyReport) -> None:
        """Set keys of `owned`, the part of the tree that the schema knows, from others."""

    def rules(self, config: RunConfig, keys: KeyReport) -> list[ConfigError]:
        """Refusals that need raw keys; those that need numbers of the layout are in `plan.rules`."""
        return []

    def notices(self, config: RunConfig, keys: KeyReport) -> None:
        """Add what a user must hear."""


def load(path: str | Path, overrides: Sequence[str], dialect: Dialect) -> LoadedYaml:
    """Read, compose, override, resolve, sort and validate; faults are collected, not raised.

    Args:
        overrides: words `key=value`, `+key=value`, `~key`; they win over the file.
    """
    keys = KeyReport(path=str(path))
    try:
        words = parse_overrides(overrides, keys.notices)
        composed = dialect.compose(Path(path).expanduser(), _choices(words))
    except ConfigErrors as exc:
        return LoadedYaml(keys, errors=list(exc.errors))
    keys.files = composed.files
    keys.notices += composed.readings
    keys.dropped |= composed.dropped
    words = [w for w in words if w.key not in composed.choices]
    known = schema_keys()
    keys.raw, keys.command_line, refused = apply_overrides(composed.tree, words, known)
    for fault in refused:
        keys.invalid |= meant(fault.key, trees.nearest(fault.key, known))
    if composed.errors:  # what could not be read may hold any key that the rest lacks
        keys.invalid |= {k for k in known if not trees.has(keys.raw, k)}
    keys.tree, keys.dangling = resolve(keys.raw)
    return _validate(keys, [*composed.errors, *refused], dialect)


def _choices(words: Sequence[Override]) -> dict[str, str | None]:
    """Words that may choose an option of a config group (`env=libero`)."""
    return {w.key: None if w.value is None else str(w.value) for w in words if isinstance(w.value, (str, type(None)))}


def _validate(keys: KeyReport, errors: list[ConfigError], dialect: Dialect) -> LoadedYaml:
    stop = dialect.not_a_run(keys.tree)
    if stop is not None:
        for path, value in trees.leaves(keys.tree):
            keys.dropped[path] = (value, "the file is refused")
        # Without an actor the files that could not be composed are the reason; otherwise the reason is the file itself.
        return LoadedYaml(keys, errors=errors if stop.key == "actor" and errors else [stop])
    classifier = dialect.classifier(keys)
    classifier.run()
    errors += classifier.errors
    owned = _owned(keys)
    dialect.fill(owned, keys)
    keys.invalid |= {owner(path) or path for path in keys.dangling if path in keys.owned}
    config, faults = _config(owned, keys)
    errors += faults
    if keys.invalid:
        keys.invalid |= {owner(p) or p for p in dependents(keys.raw, keys.invalid) if p in keys.owned}
    if config is not None:
        config._keys = keys
        rules = config  # mypy: not None
        errors += best_effort(lambda: dialect.rules(rules, keys)) if keys.invalid else dialect.rules(config, keys)
        if not faults:
            dialect.notices(config, keys)
    return LoadedYaml(keys, config, _once(errors))


def _owned(keys: KeyReport) -> dict[str, Any]:
    """Only the keys that the schema knows; dangling ones are left out, they were reported."""
    owned: dict[str, Any] = {}
    for block in RunConfig.model_fields:
        if block in keys.tree and not isinstance(keys.tree[block], dict):
            owned[block] = keys.tree[block]
    for names, value in trees.walk(keys.tree):
        path = ".".join(names)
        if path in keys.owned and path not in keys.dangling:
            trees.put_at(owned, names, value)
    return owned


def _config(owned: dict[str, Any], keys: KeyReport) -> tuple[RunConfig | None, list[ConfigError]]:
    """The valid part, with defaults where a value was refused; those keys become invalid. None: no part is valid."""
    try:
        return RunConfig.model_validate(owned), []
    except ValidationError as exc:
        faults = exc.errors(include_url=False)
    for fault in faults:
        path = ".".join(str(p) for p in fault["loc"])
        refused = owner(path) or path
        keys.invalid.add(refused)
        trees.drop(owned, refused)
    errors = [_schema_error(fault) for fault in faults]
    try:
        return RunConfig.model_validate(owned), errors
    except ValidationError:
        return None, errors


def _schema_error(fault: Any) -> ConfigError:
    """Pydantic's fault in our words."""
    path, value = ".".join(str(p) for p in fault["loc"]), fault["input"]
    field = schema_keys().get(owner(path) or "")
    message = str(fault["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    if fault["type"] == "model_type":
        message = f"a block of keys is needed, not a {type(value).__name__}"
    if value is None:
        message = f"null is not the same as leaving the key out: {message}"
    fix = f"known keys: {', '.join(block.model_fields)}" if (block := block_of(path)) else "repair it"
    if field is not None:
        fix = f"{field.description}; default {field.get_default(call_default_factory=True)!r}"
    return ConfigError(path, value if len(repr(value)) <= 120 else f"{value!r:.117}...", message, fix)


def _once(errors: list[ConfigError]) -> list[ConfigError]:
    kept = list({(e.key, e.rule): e for e in reversed(errors)}.values())[::-1]
    if len(kept) <= MAX_ERRORS:
        return kept
    more = ConfigError("", None, f"and {len(kept) - MAX_ERRORS} more faults", "repair these first")
    return [*kept[:MAX_ERRORS], more]
