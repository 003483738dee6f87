"""`hybrid5d env`: versions, devices and what is usable, for bug reports."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from hybrid5d.cli.options import Format, check_format, refuse
from hybrid5d.errors import ConfigErrors
from hybrid5d.plan.outputs import json_text


def env(format_: Format = "text") -> None:
    """Versions, devices, collectives, attention kernels, launchers, optional parts; what to put into a bug report."""
    check_format(format_)
    try:
        with redirect_stdout(StringIO()):  # DeepSpeed says there which accelerator it took
            from hybrid5d.launch.machine import machine  # torch and DeepSpeed: seconds

            result = machine()
    except ConfigErrors as exc:
        refuse(str(exc))
    sys.stdout.write(json_text(result) if format_ == "json" else "".join(f"{line}\n" for line in _lines(result)))


def _lines(result: dict[str, Any]) -> Iterator[str]:
    for name, value in result.items():
        if isinstance(value, dict):
            width = max(map(len, value), default=0)
            yield f"{name}:" if value else f"{name}: none"
            yield from (f"  {key:<{width}}  {_words(inner)}" for key, inner in value.items())
        elif name == "gpus":
            yield "gpus: none" if not value else "gpus:"
            yield from (f"  {i}  {g['name']}, {g['memory_gib']} GiB, {g['capability']}" for i, g in enumerate(value))
        else:
            yield f"{name}: {_words(value)}"


def _words(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
