"""Lines for people, written whole."""

from __future__ import annotations

import contextlib
import os
import sys
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
