"""RLinf's dialect: Hydra's composition, its own keys, its own rules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid5d.config.classify import Classifier
from hybrid5d.config.load import Composition, Dialect
from hybrid5d.config.loaded import KeyReport
from hybrid5d.config.schema import RunConfig
from hybrid5d.errors import ConfigError
from hybrid5d.rlinf import meaning
from hybrid5d.rlinf.classify import RLinfClassifier
from hybrid5d.rlinf.compose import Composer


class RLinf(Dialect):
    """RLinf's YAMLs, and native ones, whose form is the same."""

    def compose(self, path: Path, choices: Mapping[str, str | None]) -> Composition:
        composer = Composer(path, choices=dict(choices))
        tree = composer.compose()
        dropped = {}
        if composer.primary_defaults is not None:
            dropped["defaults"] = (composer.primary_defaults, "composed: the files it names are merged in")
        files = tuple(str(p) for p in composer.files)
        return Composition(tree, files, composer.errors, composer.readings, composer.groups_seen, dropped)

    def not_a_run(self, tree: dict[str, Any]) -> ConfigError | None:
        return super().not_a_run(tree) or meaning.not_a_run(tree)

    def classifier(self, keys: KeyReport) -> Classifier:
        keys.foreign = meaning.is_foreign(keys.tree)
        return RLinfClassifier(keys)

    def fill(self, owned: dict[str, Any], keys: KeyReport) -> None:
        meaning.apply_aliases(owned, keys)

    def rules(self, config: RunConfig, keys: KeyReport) -> list[ConfigError]:
        return meaning.rules(config, keys)

    def notices(self, config: RunConfig, keys: KeyReport) -> None:
        meaning.notices(config, keys)
