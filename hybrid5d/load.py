"""The one place that knows which dialects of YAML are read.

`hybrid5d.rlinf` is deletable in one piece: with `Dialect()` here native files load as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hybrid5d.config.load import load
from hybrid5d.config.loaded import LoadedYaml
from hybrid5d.config.schema import RunConfig
from hybrid5d.errors import ConfigErrors
from hybrid5d.rlinf.load import RLinf


def load_yaml(path: str | Path, overrides: Sequence[str] = ()) -> LoadedYaml:
    """A file read as far as it goes, with its faults."""
    return load(path, overrides, RLinf())


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, compose, override, resolve and validate.

    Args:
        path: a native YAML, or one of RLinf's on the Megatron backend.
        overrides: words `key=value`, `+key=value`, `~key`; they win over the file.

    Raises:
        ConfigErrors: every fault found, one line each.
    """
    loaded = load_yaml(path, overrides)
    if loaded.errors:
        raise ConfigErrors(loaded.errors)
    assert loaded.config is not None  # no errors means validated
    return loaded.config
