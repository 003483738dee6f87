"""`key=value`, `+key=value`, `++key=value` and `~key` on the command line, with Hydra's meaning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid5d.config import tree as trees
from hybrid5d.config.yaml_file import parse_yaml
from hybrid5d.errors import ConfigError, ConfigErrors


@dataclass(frozen=True)
class Override:
    """One parsed word. `action`: set (key must be known), add, force, or remove."""

    action: str
    key: str
    value: Any = None


def parse_overrides(words: Sequence[str]) -> list[Override]:
    """Parse command-line words.

    Raises:
        ConfigErrors: words that are not of the form; all of them.
    """
    parsed: list[Override] = []
    errors: list[ConfigError] = []
    for word in words:
        try:
            parsed.append(_parse(word))
        except ConfigErrors as exc:
            errors.extend(exc.errors)
    if errors:
        raise ConfigErrors(errors)
    return parsed


def _parse(word: str) -> Override:
    name, equals, text = word.partition("=")
    action = "set"
    for prefix, meaning in (("++", "force"), ("+", "add"), ("~", "remove")):
        if name.startswith(prefix):
            name, action = name[len(prefix) :], meaning
            break
    name = name.strip()
    if not name or any(not part for part in name.split(".")) or any(c.isspace() for c in name):
        raise ConfigErrors(
            [ConfigError("", None, f"override {word!r} has no key", "write key=value, +key=value or ~key")]
        )
    if action == "remove":
        return Override(action, name)
    if not equals:
        raise ConfigErrors([ConfigError("", None, f"override {word!r} has no value", f"write {word}=VALUE or ~{name}")])
    if not text.strip():
        return Override(action, name, "")
    try:
        return Override(action, name, parse_yaml(text, f"override {word!r}"))
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
    result = trees.merge({}, tree)
    known = set(known)
    told: dict[str, str] = {}
    errors: list[ConfigError] = []
    for o in overrides:
        exists = trees.has(result, o.key)
        if o.action == "remove":
            if not exists:
                errors.append(_absent(o, result, known, f"~{o.key}: there is no such key"))
                continue
            result = _without(result, o.key)
            told[o.key] = "removed on the command line"
        elif o.action == "add" and exists:
            errors.append(
                ConfigError(
                    o.key, o.value, "+key adds a key, and this one exists", f"write {o.key}=... or ++{o.key}=..."
                )
            )
        elif o.action == "set" and not exists and not _settable(o.key, known):
            errors.append(_absent(o, result, known, "neither the file nor the schema has this key"))
        else:
            result = trees.merge(result, _nest(o.key, o.value))
            if not isinstance(o.value, dict):
                result = _replace(result, o.key, o.value)
            told[o.key] = "set on the command line"
    return result, told, errors


def _settable(name: str, known: set[str]) -> bool:
    open_maps = ("cluster.component_placement.", "actor.deepspeed.")
    return name in known or name.startswith(open_maps) or any(k.startswith(f"{name}.") for k in known)


def _absent(o: Override, tree: Mapping[str, Any], known: set[str], rule: str) -> ConfigError:
    present = [path for path, _ in trees.leaves(tree)]
    near = trees.nearest(o.key, [*known, *present])
    hint = (
        f"did you mean {near}?" if near else f"write +{o.key}=... to add it" if o.action == "set" else "drop the word"
    )
    return ConfigError(o.key, o.value, rule, hint)


def _nest(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def _replace(tree: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    head, _, rest = path.partition(".")
    inner = tree.get(head)
    new = _replace(inner if isinstance(inner, dict) else {}, rest, value) if rest else value
    return {**tree, head: new}


def _without(tree: dict[str, Any], path: str) -> dict[str, Any]:
    head, _, rest = path.partition(".")
    if not rest:
        return {k: v for k, v in tree.items() if k != head}
    return {**tree, head: _without(tree[head], rest)}
