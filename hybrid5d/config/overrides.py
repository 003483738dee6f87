"""`key=value`, `+key=value`, `++key=value` and `~key` on the command line, with Hydra's meaning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid5d.config.tree import copied, drop, get, has, leaves, merge, nearest, put
from hybrid5d.config.yaml_file import parse_yaml
from hybrid5d.errors import ConfigError, ConfigErrors

_OPEN = ("cluster.component_placement.", "actor.deepspeed.")  # mappings whose keys are not the schema's


@dataclass(frozen=True)
class Override:
    """One parsed word. `action`: set (key must be known), add, force, or remove."""

    action: str
    key: str
    value: Any = None


def parse_overrides(words: Sequence[str], readings: list[str] | None = None) -> list[Override]:
    """Parse command-line words; `readings` as in `parse_yaml`.

    Raises:
        ConfigErrors: words that are not of the form; all of them.
    """
    parsed: list[Override] = []
    errors: list[ConfigError] = []
    for word in words:
        try:
            parsed.append(_parse(word, readings))
        except ConfigErrors as exc:
            errors.extend(exc.errors)
    if errors:
        raise ConfigErrors(errors)
    return parsed


def _parse(word: str, readings: list[str] | None) -> Override:
    name, equals, text = word.partition("=")
    action = "set"
    for prefix, meaning in (("++", "force"), ("+", "add"), ("~", "remove")):
        if name.startswith(prefix):
            name, action = name[len(prefix) :], meaning
            break
    name = name.strip()
    if not name or any(not part for part in name.split(".")) or any(c.isspace() for c in name):
        fix = "write key=value, +key=value or ~key"
        raise ConfigErrors([ConfigError("", None, f"override {word!r} has no key", fix)])
    if action == "remove":
        return Override(action, name)
    if not equals:
        raise ConfigErrors([ConfigError("", None, f"override {word!r} has no value", f"write {word}=VALUE or ~{name}")])
    if not text.strip():
        return Override(action, name, "")
    try:
        return Override(action, name, parse_yaml(text, f"override {word!r}", readings))
    except ConfigErrors:
        if text.lstrip()[:1] in "[{\"'":
            raise
        return Override(action, name, text)


def apply_overrides(
    tree: dict[str, Any], overrides: Iterable[Override], known: Iterable[str]
) -> tuple[dict[str, Any], dict[str, str], list[ConfigError]]:
    """Apply to a copy of `tree`.

    Returns:
        the new tree, {path: what happened} for the report, and the words that were refused. `known` are keys that may
        be set without `+` though the file does not have them.
    """
    result = copied(tree)
    known = set(known)
    applied: dict[str, str] = {}
    errors: list[ConfigError] = []
    for o in overrides:
        exists = has(result, o.key)
        if o.action == "remove":
            if drop(result, o.key):
                applied[o.key] = "removed on the command line"
            else:
                errors.append(_absent(o, result, known, f"~{o.key}: there is no such key"))
        elif o.action == "add" and exists:
            rule, fix = "+key adds a key, and this one exists", f"write {o.key}=... or ++{o.key}=..."
            errors.append(ConfigError(o.key, o.value, rule, fix))
        elif o.action == "set" and not exists and not _settable(o.key, known):
            errors.append(_absent(o, result, known, "neither the file nor the schema has this key"))
        else:
            old = get(result, o.key)
            both = isinstance(old, dict) and isinstance(o.value, dict)
            put(result, o.key, merge(old, o.value) if both else o.value)
            applied[o.key] = "set on the command line"
    return result, applied, errors


def _settable(name: str, known: set[str]) -> bool:
    return name in known or name.startswith(_OPEN) or any(k.startswith(f"{name}.") for k in known)


def _absent(o: Override, tree: Mapping[str, Any], known: set[str], rule: str) -> ConfigError:
    present = [path for path, _ in leaves(tree)]
    near = nearest(o.key, [*known, *present])
    hint = (
        f"did you mean {near}?" if near else f"write +{o.key}=... to add it" if o.action == "set" else "drop the word"
    )
    return ConfigError(o.key, o.value, rule, hint)
