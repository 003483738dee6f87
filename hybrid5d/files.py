"""Files and folders that appear whole or not at all: written beside their place, flushed to disk, then renamed.

The one atomic writer of the package, and the checksum that readers compare. A crash at any line leaves what was there
before, or the new thing, and perhaps a `NAME.tmp` or `NAME.old` beside it; the next write of NAME removes both.
"""

from __future__ import annotations

import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_whole(path: str | Path, text: str) -> None:
    """Write a text file (UTF-8); readers see the old content or the new one. One writer of a file at a time.

    Raises:
        OSError: the folder is missing or cannot be written.
    """
    path = Path(path)
    part = temporary_of(path)
    try:
        with open(part, "w", encoding="utf-8", newline="") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)
        sync(path.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def temporary_of(target: Path) -> Path:
    """Where the content of `target` is put together."""
    return target.with_name(target.name + ".tmp")


def fresh_folder(folder: Path) -> Path:
    """An empty folder in place of whatever an interrupted write left there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries (names, renames), to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def wait_until(holds: Callable[[], bool], folder: Path, seconds: float) -> bool:
    """Wait for what another host wrote: shared file systems may show it late. True once it holds."""
    deadline, pause = time.monotonic() + seconds, 0.05
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 2.0)
        with suppress(OSError):
            os.listdir(folder)  # makes clients of network file systems ask again
    return True


def old_of(target: Path) -> Path:
    """Where what was at `target` waits until the new folder is in place."""
    return target.with_name(target.name + ".old")


def publish(temporary: Path, target: Path) -> None:
    """Rename a finished folder to `target`; what was there goes to `NAME.old` first and is left for the caller."""
    for path in (*temporary.rglob("*"), temporary):
        sync(path)
    old = old_of(target)
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(target, old)
    os.replace(temporary, target)
    sync(target.parent)


@contextmanager
def replacing(target: str | Path) -> Iterator[Path]:
    """A new, empty folder that becomes `target` when the block ends, and is removed where the block raises.

    One process at a time: the callers hold a lock, or are the only writer.
    """
    target = Path(target)
    temporary = fresh_folder(temporary_of(target))
    try:
        yield temporary
        publish(temporary, target)
        shutil.rmtree(old_of(target), ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def crc32_of(path: Path) -> int:
    """CRC-32 of a file's content, read in blocks."""
    value = 0
    with open(path, "rb") as f:
        while block := f.read(1 << 24):
            value = zlib.crc32(block, value)
    return value
