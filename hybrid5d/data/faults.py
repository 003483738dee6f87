"""Faults found while reading data: collected, capped, raised together, one line each."""

from __future__ import annotations

import os

from hybrid5d.errors import DataError

SHOWN_FAULTS = 20


class Faults:
    """Collects faults of data files; `raise_if_any` turns them into one DataError.

    Only the first SHOWN_FAULTS are kept as text, the rest are counted, so that a broken corpus costs no memory.
    """

    def __init__(self, shown: int = SHOWN_FAULTS):
        self.shown = shown
        self.lines: list[str] = []
        self.count = 0

    def add(self, path: str | os.PathLike[str], line: int | None, text: str) -> None:
        """One fault; `line` is 1-based, None where the whole file is meant."""
        self.count += 1
        if len(self.lines) < self.shown:
            where = f"{path}:{line}" if line is not None else f"{path}"
            self.lines.append(f"{where}: {' '.join(text.split())}")

    def __bool__(self) -> bool:
        return self.count > 0

    def raise_if_any(self) -> None:
        if not self.count:
            return
        rest = self.count - len(self.lines)
        tail = [f"... and {rest} more faults of this kind in the data"] if rest else []
        raise DataError("\n".join(self.lines + tail))
