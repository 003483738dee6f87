"""Pages of docs/ that a script makes whole."""

from __future__ import annotations

import sys
from pathlib import Path


def write_or_compare(page: Path, text: str, target: str) -> int:
    """The script's end: print, `--write` or `--check` a page; `target` of the Makefile writes it."""
    if "--write" in sys.argv[1:]:
        page.write_text(text, encoding="utf-8")
    elif "--check" in sys.argv[1:]:
        same = page.read_text(encoding="utf-8") == text
        print(f"docs/{page.name} is up to date" if same else f"docs/{page.name}: run make {target}")
        return int(not same)
    else:
        print(text, end="")
    return 0
