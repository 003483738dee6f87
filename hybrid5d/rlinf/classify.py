"""RLinf's keys: another component's, known and dropped, must be off, or unknown."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from hybrid5d.config import tree as trees
from hybrid5d.config.classify import OTHER_COMPONENT, Classifier, Kind
from hybrid5d.config.loaded import KeyReport
from hybrid5d.config.schema import RunConfig, schema_keys
from hybrid5d.rlinf.keys import FOREIGN, MUST_BE_OFF, RL_BLOCKS, Foreign

_PP = "actor.model.pipeline_model_parallel_size"
_OPEN = ("data", "algorithm", "rollout", "reward", "critic")  # RLinf has keys there that no list of ours holds
_SURE = 0.85  # similarity at which a typo of ours is more likely than a foreign key


@lru_cache(maxsize=1)
def _wildcards() -> list[tuple[str, Foreign]]:
    patterns = [(pattern[:-1], entry) for pattern, entry in FOREIGN.items() if pattern.endswith("*")]
    return sorted(patterns, key=lambda item: -len(item[0]))


def _foreign(path: str) -> Foreign | None:
    """The entry of a key of RLinf or Megatron that has no place here."""
    return FOREIGN.get(path) or next((entry for prefix, entry in _wildcards() if path.startswith(prefix)), None)


def _must_be_off(path: str) -> str | None:
    return next((k for k in MUST_BE_OFF if path == k or path.startswith(f"{k}.")), None)


class RLinfClassifier(Classifier):
    """Sorts RLinf's keys beside ours."""

    def __init__(self, keys: KeyReport):
        super().__init__(keys)
        self._blocks: list[str] = []
        self._notices: dict[str, list[str]] = {}
        placement = trees.get(keys.tree, "cluster.component_placement")
        names: Iterable[str] = placement if isinstance(placement, dict) else ()
        self._components = {n.strip() for key in names for n in str(key).split(",")} - {"actor"}

    def run(self) -> None:
        """Sort all keys, then say what was left out."""
        super().run()
        if self._blocks:
            self.keys.notice("blocks of other components are not ours and were left out: " + ", ".join(self._blocks))
        for why, names in self._notices.items():
            self.keys.notice(f"dropped: {', '.join(names)}: {why}")

    def sort(self, path: str) -> Kind:
        """The kind of a key."""
        kind, top = super().sort(path), path.split(".")[0]
        if kind is Kind.UNKNOWN_BLOCK:
            known = top in RL_BLOCKS or top in self._components
            stray = self.keys.foreign and trees.nearest(top, RunConfig.model_fields) is None
            return Kind.COMPONENT if known or stray else kind
        if kind is Kind.UNKNOWN and _must_be_off(path):
            return Kind.MUST_BE_OFF
        if kind is Kind.UNKNOWN and _foreign(path) and (path in FOREIGN or not self._near_ours(path)):
            return Kind.FOREIGN
        return kind

    def component(self, path: str, value: object) -> None:
        """A block of another component, or one that RLinf's actor does not read."""
        top = path.split(".")[0]
        known = top in RL_BLOCKS or top in self._components
        self.keys.dropped[path] = (value, OTHER_COMPONENT if known else "a block that the actor does not read")
        if top not in self._blocks and top not in ("hydra", "defaults"):
            self._blocks.append(top)

    def foreign(self, path: str, value: object) -> None:
        """A key of RLinf's or Megatron's without a place here."""
        entry = _foreign(path)
        assert entry is not None  # `sort` looked
        self._drop(path, value, entry.why, entry.notice)

    def must_be_off(self, path: str, value: object) -> None:
        """A key that would change the run if it were on."""
        name, keys = _must_be_off(path), self.keys
        assert name is not None  # `sort` looked
        off, rule, fix = MUST_BE_OFF[name]
        whole = trees.get(keys.tree, name)
        if name.endswith("use_tp_pp_dp_mapping") and trees.get(keys.tree, _PP, 1) == 1:
            off = (*off, True)  # without a pipeline both orders are the same
        on = path in keys.dangling or not any(whole == v and type(whole) is type(v) for v in off)
        if on and all(e.key != name for e in self.errors):
            self._fault(name, whole, rule, fix)
        keys.dropped[path] = (value, rule if on else "off, as it must be")

    def unknown(self, path: str, value: object) -> None:
        """RLinf has more keys than our lists: in its own files a key that is like none of ours is dropped."""
        near = self._near_ours(path) or self.near(path)
        if self.keys.foreign and (path.split(".")[0] in _OPEN or near is None):
            hint = f" (similar: {near})" if near else ""
            self._drop(path, value, f"unknown to RLinf's Megatron actor and to us{hint}", notice=True)
        else:
            super().unknown(path, value)

    def near(self, path: str, cutoff: float = trees.NEAR) -> str | None:
        """The key beside `path`, ours or RLinf's, whose name is most like it."""
        parent = path.rpartition(".")[0]
        foreign = {k for k in FOREIGN if "*" not in k and k.rpartition(".")[0] == parent}
        ours = {k for k in schema_keys() if k.startswith(f"{parent}.")}
        names = {k[len(parent) + 1 :].split(".")[0] for k in foreign | ours}
        name = trees.nearest(path.rpartition(".")[2], sorted(names), cutoff)
        return f"{parent}.{name}".lstrip(".") if name else None

    def _near_ours(self, path: str) -> str | None:
        return super().near(path, _SURE)

    def _drop(self, path: str, value: object, why: str, notice: bool) -> None:
        self.keys.dropped[path] = (value, why)
        if path in self.keys.dangling:
            self.keys.notice(f"{path}: {self.keys.dangling[path]}; the key is dropped, so this does not matter")
        elif notice and value not in (None, False):
            self._notices.setdefault(why, []).append(f"{path}={value!r}")
