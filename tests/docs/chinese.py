"""Chinese pages beside the English ones: `python -m tests.docs.chinese --write` copies code, commands and numbers over.

Prose is translated by hand. Code blocks, `make matrix`'s table and cells without words must be the same on both sides.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PAIRS = {"README.md": "README.zh-CN.md", "docs/tutorial.md": "docs/tutorial.zh-CN.md"}
BLOCK = re.compile(r"^```\w*\n.*?^```$", re.DOTALL | re.MULTILINE)
MATRIX = re.compile(r"<!-- matrix:.*?<!-- /matrix -->", re.DOTALL)
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)


def read(name: str) -> str:
    """A page."""
    return (REPO / name).read_text(encoding="utf-8")


def blocks(text: str) -> list[str]:
    """Code blocks."""
    return BLOCK.findall(text)


def _cells(line: str) -> list[str]:
    return line.strip().strip("|").split("|")


def _numbers(cell: str) -> bool:
    """A cell of numbers alone."""
    return bool(re.search(r"\d", cell)) and not re.search(r"[A-Za-z]{2}|[\u4e00-\u9fff]", cell)


def tables(text: str) -> list[list[list[str]]]:
    """Cells of each table."""
    found = TABLE.findall(MATRIX.sub("", BLOCK.sub("", text)))
    return [[_cells(line) for line in table.splitlines()] for table in found]


def numbers(text: str) -> list[list[list[str]]]:
    """Cells of numbers of each table, by row."""
    return [[[c.strip() for c in row if _numbers(c)] for row in table] for table in tables(text)]


def synced(source: str, target: str) -> str:
    """The translation with the source's code blocks, matrix and numbers, where both have the same shape."""
    ours = iter(blocks(source))
    if len(blocks(source)) == len(blocks(target)):
        target = BLOCK.sub(lambda _: next(ours), target)
    if matrix := MATRIX.search(source):
        target = MATRIX.sub(lambda _: matrix.group(), target)
    rows = [row for table in tables(source) for row in table]
    lines = [n for n, line in enumerate(target.splitlines()) if line.startswith("|") and n not in _fixed(target)]
    if [len(row) for row in rows] == [len(_cells(target.splitlines()[n])) for n in lines]:
        written = target.splitlines()
        for n, row in zip(lines, rows, strict=True):
            cells = _cells(written[n])
            written[n] = f"|{'|'.join(a if _numbers(a) else b for a, b in zip(row, cells, strict=True))}|"
        target = "\n".join(written) + "\n"
    return target


def _fixed(text: str) -> set[int]:
    """Lines inside code blocks and the matrix."""
    found = [m for pattern in (BLOCK, MATRIX) for m in pattern.finditer(text)]
    return {n for m in found for n in range(text.count("\n", 0, m.start()), text.count("\n", 0, m.end()) + 1)}


def main() -> int:
    """Write."""
    for name, other in PAIRS.items():
        text = read(other)
        fresh = synced(read(name), text)
        if "--write" in sys.argv[1:] and fresh != text:
            (REPO / other).write_text(fresh, encoding="utf-8")
            print(f"{other}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
