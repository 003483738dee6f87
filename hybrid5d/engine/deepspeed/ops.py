"""DeepSpeed's compiled ops."""

from __future__ import annotations

import contextlib
import io

import deepspeed


def usable_ops() -> dict[str, bool]:
    """Op -> whether it could be built here. Half a second; nothing is built."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ops = deepspeed.ops.__compatible_ops__
        return {
            name.removeprefix("deepspeed_"): bool(ops[name])
            for name in sorted(ops)
            if name != "deepspeed_not_implemented"
        }
