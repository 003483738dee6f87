"""Rules on raw DeepSpeed keys that act in a DeepSpeed program of one's own, but not in `hybrid5d train`."""

from __future__ import annotations

from typing import Any

from hybrid5d.config import tree as trees
from hybrid5d.errors import ConfigError, reads
from hybrid5d.plan.deepspeed_keys import GATHER_ON_SAVE, UNUSED
from hybrid5d.plan.draft import Draft

_BLOCK = "actor.deepspeed"


@reads(_BLOCK)
def unused(draft: Draft) -> list[ConfigError]:
    """Keys without an effect in training, where they ask for something; false, 0 and none ask for nothing."""
    block, errors = draft.config.actor.deepspeed, []
    for name, (why, fix) in UNUSED.items():
        value = trees.get(block, name, None)
        if _asks(value):
            errors.append(ConfigError(f"{_BLOCK}.{name}", value, f"has no effect in training: {why}", fix))
    return errors


def gather_notices(block: dict[str, Any]) -> list[str]:
    """Keys whose wish is met without DeepSpeed."""
    asked = [path for path, value in trees.leaves(block) if path in GATHER_ON_SAVE and value is True]
    return [f"{_BLOCK}.{path} is not read: exports always hold whole weights" for path in asked]


def _asks(value: Any) -> bool:
    """Whether a key is on; of a section, its switch, and without one any of its keys."""
    if not isinstance(value, dict):
        return value not in (None, False, 0, "", "none", "auto")
    switch = next((value[key] for key in ("enabled", "device") if key in value), None)
    return _asks(switch) if switch is not None else any(_asks(item) for item in value.values())
