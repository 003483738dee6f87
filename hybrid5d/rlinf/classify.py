"""Sorts every input key: ours, another component's, known to RLinf and dropped, must be off, or unknown."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from hybrid5d.config import tree as trees
from hybrid5d.config.schema import RunConfig, block_of, schema_keys
from hybrid5d.errors import ConfigError
from hybrid5d.rlinf.account import Account
from hybrid5d.rlinf.keys import FOREIGN, MUST_BE_OFF, RL_BLOCKS, Foreign

_OPEN = ("cluster.component_placement", "actor.deepspeed", "cluster.node_groups")
OTHER_COMPONENT = "belongs to another component of RLinf"
_PP = "actor.model.pipeline_model_parallel_size"
_SURE = 0.85  # similarity at which a typo is more likely than a foreign key


@lru_cache(maxsize=1)
def _known() -> frozenset[str]:
    return frozenset(schema_keys())


@lru_cache(maxsize=1)
def _wildcards() -> list[tuple[str, Foreign]]:
    found = [(pattern[:-1], entry) for pattern, entry in FOREIGN.items() if pattern.endswith("*")]
    return sorted(found, key=lambda item: -len(item[0]))


def owner(path: str) -> str | None:
    """The schema key that `path` is, or lies under; None where it is not ours."""
    parts = path.split(".")
    for n in range(len(parts), 0, -1):
        candidate = ".".join(parts[:n])
        if candidate in _known():
            return candidate
        if candidate in _OPEN:
            return candidate
    return path if block_of(path) is not None else None


def foreign(path: str) -> Foreign | None:
    """RLinf's or Megatron's key that has no place here."""
    exact = FOREIGN.get(path)
    if exact is not None:
        return exact
    for prefix, entry in _wildcards():
        if path.startswith(prefix):
            return entry
    return None


def _siblings(path: str) -> list[str]:
    parent = path.rpartition(".")[0]
    names = [*_known(), *(k for k in FOREIGN if "*" not in k)]
    here = [k for k in names if k.rpartition(".")[0] == parent]
    blocks = {k[len(parent) + 1 :].split(".")[0] for k in _known() if k.startswith(f"{parent}.")}
    return [k.rpartition(".")[2] for k in here] + sorted(blocks)


def meant(path: str, near: str | None) -> set[str]:
    """What the writer of an unknown key may have meant: what is near it, and keys of the same name elsewhere."""
    name = path.rpartition(".")[2]
    return {k for k in _known() if k.rpartition(".")[2] == name} | ({near} if near else set())


def _block_above(path: str) -> str:
    """The longest prefix of a path that is a block of the schema."""
    parts = path.split(".")[:-1]
    while parts and block_of(".".join(parts)) is None:
        parts.pop()
    return ".".join(parts)


def _near(path: str, cutoff: float, ours_only: bool = False) -> str | None:
    parent, _, name = path.rpartition(".")
    names = [k.rpartition(".")[2] for k in _known() if k.rpartition(".")[0] == parent] if ours_only else _siblings(path)
    found = trees.nearest(name, names, cutoff)
    return f"{parent}.{found}".lstrip(".") if found else None


class Classifier:
    """Walks the tree once and fills an `Account`; faults are collected."""

    def __init__(self, account: Account):
        self.account = account
        self.errors: list[ConfigError] = []
        self.blocks: list[str] = []
        self._unknown_blocks: set[str] = set()
        self._loud: dict[str, list[str]] = {}
        placement = trees.get(account.tree, "cluster.component_placement")
        names: Iterable[str] = placement if isinstance(placement, dict) else ()
        self.components = {n.strip() for key in names for n in str(key).split(",")} - {"actor"}

    def run(self) -> None:
        for path, value in trees.leaves(self.account.tree):
            self._leaf(path, value)
        if self.blocks:
            self.account.tell("blocks of other components are not ours and were left out: " + ", ".join(self.blocks))
        self._tell_dropped()

    def _leaf(self, path: str, value: Any) -> None:
        top = path.split(".")[0]
        if top not in RunConfig.model_fields:
            self._other_block(top, path, value)
        elif owner(path) is not None:
            self._owned(path, value)
        elif path.startswith(tuple(MUST_BE_OFF)) and self._must_be_off(path, value):
            return
        else:
            self._not_ours(path, value)

    def _owned(self, path: str, value: Any) -> None:
        if path in self.account.dangling:
            self.errors.append(
                ConfigError(
                    path,
                    value,
                    f"the reference cannot be resolved: {self.account.dangling[path]}",
                    "define what it refers to, or write the value here",
                )
            )
        self.account.owned[path] = value

    def _must_be_off(self, path: str, value: Any) -> bool:
        name = next((k for k in MUST_BE_OFF if path == k or path.startswith(f"{k}.")), None)
        if name is None:
            return False
        off, rule, fix = MUST_BE_OFF[name]
        whole = trees.get(self.account.tree, name)
        if name.endswith("use_tp_pp_dp_mapping") and trees.get(self.account.tree, _PP, 1) == 1:
            off = (*off, True)  # without a pipeline both orders are the same
        on = path in self.account.dangling or not any(whole == v and type(whole) is type(v) for v in off)
        if on and all(e.key != name for e in self.errors):
            self.errors.append(ConfigError(name, whole, rule, fix))
        self.account.dropped[path] = (value, rule if on else "off, as it must be")
        return True

    def _other_block(self, top: str, path: str, value: Any) -> None:
        if top in RL_BLOCKS or top in self.components:
            self._leave_out(top, path, value, OTHER_COMPONENT)
            return
        near = trees.nearest(top, RunConfig.model_fields, 0.75)
        if near is None and self.account.foreign:
            self._leave_out(top, path, value, "a block that the actor does not read")
            return
        self.account.dropped[path] = (value, "unknown block")
        self._spoil(path, near)
        if top not in self._unknown_blocks:
            self._unknown_blocks.add(top)
            self.errors.append(
                ConfigError(
                    top,
                    None,
                    "unknown block",
                    f"did you mean {near}?" if near else f"known blocks: {', '.join(RunConfig.model_fields)}",
                )
            )

    def _leave_out(self, top: str, path: str, value: Any, why: str) -> None:
        self.account.dropped[path] = (value, why)
        if top not in self.blocks and top not in ("hydra", "defaults"):
            self.blocks.append(top)

    def _not_ours(self, path: str, value: Any) -> None:
        exact = FOREIGN.get(path)
        entry = exact or foreign(path)
        sure = None if exact else _near(path, _SURE, ours_only=True)
        if entry is not None and sure is None:
            self._drop(path, value, entry)
            return
        near = sure or _near(path, 0.75)
        lenient = self.account.foreign and (path.startswith(("data.", "algorithm.")) or near is None)
        if lenient:
            hint = f" (similar: {near})" if near else ""
            self._drop(path, value, Foreign(f"unknown to RLinf's Megatron actor and to us{hint}", loud=True))
            return
        parent = _block_above(path)
        stray = f"{parent}.{path[len(parent) + 1 :].split('.')[0]}"  # a whole unknown mapping is one fault
        near = _near(stray, 0.75) if stray != path else near
        known = sorted({k.rpartition(".")[2] for k in _known() if k.rpartition(".")[0] == parent})
        fix = f"did you mean {near}?" if near else f"known keys of {parent}: {', '.join(known)}"
        self.account.dropped[path] = (value, "unknown key")
        self._spoil(path, near)
        self.errors.append(ConfigError(stray, value if stray == path else None, "unknown key", fix))

    def _spoil(self, path: str, near: str | None) -> None:
        """A key that the file has too is known; one that it lacks may be what the unknown key was to set."""
        self.account.spoilt |= {k for k in meant(path, near) if not trees.has(self.account.tree, k)}

    def _drop(self, path: str, value: Any, entry: Foreign) -> None:
        self.account.dropped[path] = (value, entry.why)
        if path in self.account.dangling:
            self.account.tell(f"{path}: {self.account.dangling[path]}; the key is dropped, so this does not matter")
        elif entry.loud and value not in (None, False):
            self._loud.setdefault(entry.why, []).append(f"{path}={value!r}")

    def _tell_dropped(self) -> None:
        for why, keys in self._loud.items():
            self.account.tell(f"dropped: {', '.join(keys)}: {why}")
