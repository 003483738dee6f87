"""From a YAML file (and command-line words) to a validated `RunConfig`.

Where the file has faults, `Document.judged` is the config as far as it is known, with holes: see `config.errors`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hybrid5d.config import tree as trees
from hybrid5d.config.overrides import Override, apply_overrides, parse_overrides
from hybrid5d.config.resolve import resolve
from hybrid5d.config.schema import RunConfig, schema_keys
from hybrid5d.errors import ConfigError, ConfigErrors, best_effort
from hybrid5d.rlinf import meaning as rlinf
from hybrid5d.rlinf.account import Account, Document
from hybrid5d.rlinf.classify import Classifier, meant, owner
from hybrid5d.rlinf.compose import Composer

MAX_ERRORS = 200
_WORD = re.compile(r"\w+")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, compose, override, resolve and validate.

    Args:
        path: a native YAML, or one of RLinf's on the Megatron backend.
        overrides: words `key=value`, `+key=value`, `~key`; they win over the file.

    Raises:
        ConfigErrors: every fault found, one line each.
    """
    document = load_document(path, overrides)
    if document.errors:
        raise ConfigErrors(document.errors)
    config = document.config
    assert isinstance(config, RunConfig)  # no errors means validated
    return config


def load_document(path: str | Path, overrides: Sequence[str] = ()) -> Document:
    """`load_config` that returns what it found instead of raising; used by `convert`, which reports refusals too."""
    account = Account(path=str(path))
    try:
        words = parse_overrides(overrides)
        composer = Composer(Path(path), choices=_choices(words))
        composed = composer.compose()
    except ConfigErrors as exc:
        return Document(account, errors=list(exc.errors), fatal=True)
    errors = list(composer.errors)
    account.files = tuple(str(p) for p in composer.files)
    words = [w for w in words if w.key not in composer.groups_seen]
    known = list(schema_keys())
    account.raw, account.command_line, refused = apply_overrides(composed, words, known)
    errors += refused
    for fault in refused:
        account.spoilt |= meant(fault.key, trees.nearest(fault.key, known))
    if composer.errors:  # what could not be read may hold any key that the rest lacks
        account.spoilt |= {k for k in known if not trees.has(account.raw, k)}
    account.tree, account.dangling = resolve(account.raw)
    own_defaults = composer.primary_defaults
    if own_defaults is not None:
        account.dropped["defaults"] = (own_defaults, "composed: the files it names are merged in")
    return _validate(account, errors)


def _choices(words: Sequence[Override]) -> dict[str, str | None]:
    """Words that may choose an option of a config group (`env=libero`)."""
    return {w.key: None if w.value is None else str(w.value) for w in words if isinstance(w.value, (str, type(None)))}


def _validate(account: Account, errors: list[ConfigError]) -> Document:
    stop = rlinf.not_a_run(account.tree)
    if stop is not None:
        for path, value in trees.leaves(account.tree):
            account.dropped[path] = (value, "the file is refused")
        # Without an actor the files that could not be composed are the reason; otherwise the reason is the file itself.
        return Document(account, errors=errors if stop.key == "actor" and errors else [stop], fatal=True)
    account.foreign = rlinf.is_foreign(account.tree)
    classifier = Classifier(account)
    classifier.run()
    errors += classifier.errors
    owned = _subtree(account)
    rlinf.apply_aliases(owned, account)
    account.spoilt |= {owner(path) or path for path in account.dangling if path in account.owned}
    config: RunConfig | None = None
    judged: RunConfig | None = None
    try:
        config = judged = RunConfig.model_validate(owned)
        config._account = account
    except ValidationError as exc:
        errors += _schema_errors(exc, account)
        judged = _rest(owned, exc, account)
    _spread(account)
    if judged is not None:
        judged = judged.without(sorted(account.spoilt))
    errors += best_effort(lambda: rlinf.rules(account, judged)) if account.spoilt else rlinf.rules(account, judged)
    if config is not None:
        rlinf.notices(account, config)
    return Document(account, config, judged, _once(errors))


def _rest(owned: dict[str, Any], exc: ValidationError, account: Account) -> RunConfig | None:
    """What is valid without the refused keys, which become spoilt; None where that is not a config either."""
    for fault in exc.errors(include_url=False):
        path = ".".join(str(p) for p in fault["loc"])
        refused = owner(path) or path
        account.spoilt.add(refused)
        trees.drop(owned, refused)
    try:
        config = RunConfig.model_validate(owned)
    except ValidationError:
        return None
    config._account = account
    return config


def _spread(account: Account) -> None:
    """What refers to a spoilt key is spoilt too. Names are compared, not paths: references may be relative."""
    texts = [(owner(p), str(v)) for p, v in trees.leaves(account.raw) if p in account.owned and "${" in str(v)]
    words = {key: set(_WORD.findall(text)) for key, text in texts if key is not None}
    while True:
        names = {key.rpartition(".")[2] for key in account.spoilt}
        more = {key for key, used in words.items() if used & names} - account.spoilt
        if not more:
            return
        account.spoilt |= more


def _subtree(account: Account) -> dict[str, Any]:
    """Only the keys that the schema knows; dangling ones are left out, they were reported."""
    owned: dict[str, Any] = {}
    for block in RunConfig.model_fields:
        if block in account.tree and not isinstance(account.tree[block], dict):
            owned[block] = account.tree[block]
    for path, value in account.owned.items():
        if path in account.dangling:
            continue
        if path.startswith("cluster.component_placement."):
            _put_placement(owned.setdefault("cluster", {}).setdefault("component_placement", {}), path, value, account)
        else:
            trees.put(owned, path, value)
    return owned


def _put_placement(placed: dict[str, Any], path: str, value: Any, account: Account) -> None:
    """One leaf of the placement: a component's, or of the mapping {node_group, placement} that a component may have."""
    rest = path.split(".", 2)[2]
    written = trees.get(account.tree, "cluster.component_placement")
    outer = next((n for n, spec in written.items() if isinstance(spec, dict) and rest.startswith(f"{n}.")), None)
    if outer is None:
        placed[rest] = value
    else:
        trees.put(placed.setdefault(str(outer), {}), rest.removeprefix(f"{outer}."), value)


def _schema_errors(exc: ValidationError, account: Account) -> list[ConfigError]:
    fields = schema_keys()
    errors = []
    for fault in exc.errors(include_url=False):
        path = ".".join(str(p) for p in fault["loc"])
        found = next((fields[k] for k in (path, path.rpartition(".")[0]) if k in fields), None)
        message = str(fault["msg"]).removeprefix("Value error, ").removeprefix("Input ")
        if fault["input"] is None:
            message = f"null is not the same as leaving the key out: {message}"
        fix = f"{found.description}; default {found.get_default(call_default_factory=True)!r}" if found else "repair it"
        errors.append(ConfigError(path, _short(fault["input"]), message, fix))
    return errors


def _short(value: Any) -> Any:
    text = repr(value)
    return value if len(text) <= 120 else f"{text[:117]}..."


def _once(errors: list[ConfigError]) -> list[ConfigError]:
    seen: set[tuple[str, str]] = set()
    kept = []
    for error in errors:
        if (error.key, error.rule) not in seen:
            seen.add((error.key, error.rule))
            kept.append(error)
    if len(kept) <= MAX_ERRORS:
        return kept
    more = ConfigError("", None, f"and {len(kept) - MAX_ERRORS} more faults", "repair these first")
    return [*kept[:MAX_ERRORS], more]
