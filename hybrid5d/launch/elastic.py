"""`hybrid5d train --elastic`: how many processes there are now, and the command line of the layout for them."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from hybrid5d.console import say
from hybrid5d.devices import visible_devices, wants_cpu
from hybrid5d.errors import ConfigError, ConfigErrors
from hybrid5d.launch.preflight import Argv
from hybrid5d.load import load_yaml
from hybrid5d.plan.elastic import nearest
from hybrid5d.plan.hardware import Hardware, hardware_of

_DEVICES, _CARDS = Path("/dev"), Path("/proc/driver/nvidia/gpus")


def elastic(argv: Argv, num_procs: int | None) -> tuple[Argv, int]:
    """The command line with the nearest layout that `num_procs` processes can form, and how many it uses; said.

    Args:
        num_procs: None: one for each GPU that may be used now.

    Raises:
        ConfigErrors: no layout is legal, the global batch is not stated, or nobody says how many processes.
    """
    loaded = load_yaml(argv.config, argv.overrides)
    config = loaded.config
    if config is None or loaded.errors:
        raise ConfigErrors(loaded.errors)
    count = num_procs if num_procs is not None else _gpus()
    errors = []
    if not count:
        rule = "without GPUs the number of processes must be said"
        errors.append(ConfigError("--elastic", True, rule, "add --num-procs N"))
    if config.actor.global_batch_size is None and not config.is_rl:
        rule = "null is micro_batch_size x dp, which would change with the layout"
        errors.append(ConfigError("actor.global_batch_size", None, rule, "write the rows of a step"))
    if errors:
        raise ConfigErrors(errors)
    assert count
    found = nearest(config, count, _card())
    if isinstance(found, list):
        raise ConfigErrors(found)
    say(found.text())
    return replace(argv, overrides=(*argv.overrides, *found.overrides())), found.plan.layout.world_size


def _gpus() -> int:
    if wants_cpu(os.environ):
        return 0
    visible = visible_devices(os.environ)
    if visible is not None:
        return len(visible)
    return sum(bool(re.fullmatch(r"nvidia\d+", p.name)) for p in _DEVICES.iterdir())


def _card() -> Hardware | None:
    """This machine's cards as NVIDIA's driver names the first; None: no GPU is used, or `plan` does not know it."""
    for about in sorted(_CARDS.glob("*/information")) if not wants_cpu(os.environ) else ():
        model = re.search(r"^Model:\s*(.+)$", about.read_text(), re.MULTILINE)
        return hardware_of(model[1]) if model else None
    return None
