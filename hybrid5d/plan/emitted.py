"""Values with the schema keys that they were made of: what `convert` reports is read from here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hybrid5d.config import tree as trees


@dataclass
class Emitted:
    """A tree under construction.

    Attributes:
        sources: path in the tree -> keys that decided its value.
        lost: keys that another one overrides -> which, in words.
        free: paths that `actor.deepspeed` may replace.
        reasons: why a path has the value that it has, where no source says it.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    free: set[str] = field(default_factory=set)
    reasons: dict[str, str] = field(default_factory=dict)

    def emit(
        self, path: str, value: Any, *sources: str, over: Iterable[str] = (), why: str = "", free: bool = False
    ) -> None:
        """Set a value.

        Args:
            sources: schema keys that it was made of; `world_size` where the number of processes decided.
            over: keys that have no say because of the sources, and `why` (default: the first source wins).
        """
        trees.put(self.tree, path, value)
        self.sources[path] = sources
        if why:
            self.reasons[path] = why
        for key in over:
            self.lost[key] = why or f"{sources[0]} wins"
        if free:
            self.free.add(path)

    def paths(self, key: str) -> list[str]:
        """Where a schema key went."""
        return [path for path, sources in self.sources.items() if key in sources]
