"""Lines for people, written whole, and how they name things."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any


def say(text: str, stream: Any = None) -> None:
    """Write whole lines at once, so that those of several ranks do not mix."""
    stream = stream or sys.stderr
    stream.flush()
    data = (text.rstrip("\n") + "\n").encode("utf-8", "replace")
    try:
        os.write(stream.fileno(), data)
    except (OSError, ValueError):  # a stream without a file (tests), or closed
        with contextlib.suppress(OSError, ValueError):
            stream.write(data.decode("utf-8"))


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0 to 3`, `ranks 0, 2`: how messages name ranks, given in ascending order."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    whole = list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    return f"ranks {ranks[0]} to {ranks[-1]}" if whole else f"ranks {', '.join(map(str, ranks))}"


def package_version(package: str) -> str | None:
    """Of an installed package; None where it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
