"""Sorts every input key by what it is to us. Other programs' keys are sorted by a subclass of `Classifier`."""

from __future__ import annotations

from enum import Enum

from hybrid5d.config import tree as trees
from hybrid5d.config.loaded import KeyReport
from hybrid5d.config.schema import RunConfig, block_of, schema_keys
from hybrid5d.errors import ConfigError

OTHER_COMPONENT = "belongs to another component of RLinf"


class Kind(Enum):
    """What a key is; the value names the method that handles it."""

    OWN = "own"  # of the schema
    COMPONENT = "component"  # in a block of another component
    FOREIGN = "foreign"  # known to the other program, without a place here
    MUST_BE_OFF = "must_be_off"  # the same, but it would change the run if it were on
    UNKNOWN_BLOCK = "unknown_block"
    UNKNOWN = "unknown"


def owner(path: str) -> str | None:
    """The schema key that `path` is, or lies under; None where it is not ours."""
    parts = path.split(".")
    for n in range(len(parts), 0, -1):
        candidate = ".".join(parts[:n])
        if candidate in schema_keys():
            return candidate
    return path if block_of(path) is not None else None


def siblings(path: str) -> set[str]:
    """Names of the schema beside `path`: keys and blocks."""
    parent = path.rpartition(".")[0]
    return {k[len(parent) + 1 :].split(".")[0] for k in schema_keys() if k.startswith(f"{parent}.")}


def meant(path: str, near: str | None) -> set[str]:
    """What the writer of an unknown key may have meant: what is near it, and keys of the same name elsewhere."""
    name = path.rpartition(".")[2]
    return {k for k in schema_keys() if k.rpartition(".")[2] == name} | ({near} if near else set())


def block_above(path: str) -> str:
    """The longest prefix of a path that is a block of the schema."""
    parts = path.split(".")[:-1]
    while parts and block_of(".".join(parts)) is None:
        parts.pop()
    return ".".join(parts)


class Classifier:
    """Walks the tree once and fills a `KeyReport`; faults are collected."""

    def __init__(self, keys: KeyReport):
        self.keys = keys
        self.errors: list[ConfigError] = []
        self._unknown_blocks: set[str] = set()

    def run(self) -> None:
        """Sort all keys."""
        for path, value in trees.leaves(self.keys.tree):
            getattr(self, self.sort(path).value)(path, value)

    def sort(self, path: str) -> Kind:
        """The kind of a key."""
        if path.split(".")[0] not in RunConfig.model_fields:
            return Kind.UNKNOWN_BLOCK
        return Kind.UNKNOWN if owner(path) is None else Kind.OWN

    def near(self, path: str, cutoff: float = trees.NEAR) -> str | None:
        """The key beside `path` whose name is most like it."""
        parent = path.rpartition(".")[0]
        name = trees.nearest(path.rpartition(".")[2], siblings(path), cutoff)
        return f"{parent}.{name}".lstrip(".") if name else None

    def own(self, path: str, value: object) -> None:
        """A key of the schema."""
        self.keys.owned[path] = value
        if path in self.keys.dangling:
            rule = f"the reference cannot be resolved: {self.keys.dangling[path]}"
            self._fault(path, value, rule, "define what it refers to, or write the value here")

    def unknown_block(self, path: str, value: object) -> None:
        """A key in a top-level block that nobody knows; one fault for the block."""
        top = path.split(".")[0]
        near = trees.nearest(top, RunConfig.model_fields)
        self._invalidate(path, value, "unknown block", near)
        if top not in self._unknown_blocks:
            self._unknown_blocks.add(top)
            fix = f"did you mean {near}?" if near else f"known blocks: {', '.join(RunConfig.model_fields)}"
            self._fault(top, None, "unknown block", fix)

    def unknown(self, path: str, value: object) -> None:
        """A key that nobody knows in a block of ours; a whole unknown mapping is one fault."""
        parent = block_above(path)
        stray = f"{parent}.{path[len(parent) + 1 :].split('.')[0]}"
        near = self.near(stray)
        names = sorted({k.rpartition(".")[2] for k in schema_keys() if k.rpartition(".")[0] == parent})
        fix = f"did you mean {near}?" if near else f"known keys of {parent}: {', '.join(names)}"
        self._invalidate(path, value, "unknown key", near)
        self._fault(stray, value if stray == path else None, "unknown key", fix)

    def _invalidate(self, path: str, value: object, why: str, near: str | None) -> None:
        """A key that the file has too is known; one that it lacks may be what the unknown key was to set."""
        self.keys.dropped[path] = (value, why)
        self.keys.invalid |= {k for k in meant(path, near) if not trees.has(self.keys.tree, k)}

    def _fault(self, key: str, value: object, rule: str, fix: str) -> None:
        self.errors.append(ConfigError(key, value, rule, fix))
