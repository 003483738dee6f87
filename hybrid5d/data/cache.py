"""The token cache: built once per content, found again by its key, never seen half-written.

One folder per key. A builder holds an exclusive `flock` on `<key>.lock`, writes to `<key>.tmp` and renames it, so
readers see a whole store or none. The kernel drops the lock when its owner dies, however it dies: the next process then
finds no store, throws the unfinished folder away and builds. Other ranks of the machine wait on the same lock, so no
communication is needed; ranks that share no file system build one cache per machine.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybrid5d.console import package_version
from hybrid5d.data.store import FORMAT_VERSION, TokenStore, open_store
from hybrid5d.errors import DataError
from hybrid5d.files import replacing

_BLOCK = 1 << 22


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/hybrid5d/tokens`, else `~/.cache/hybrid5d/tokens`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hybrid5d" / "tokens"


def content_hash(path: Path) -> str:
    """Hash of one file's bytes, read in blocks."""
    digest = hashlib.blake2b(digest_size=20)
    with open(path, "rb") as f:
        while block := f.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def cache_key(contents: Iterable[str], recipe: dict[str, Any]) -> str:
    """Key of a store: what goes in (content hashes in order) and what is done to it (tokenizer, template, options)."""
    versions = {package: package_version(package) or "" for package in ("tokenizers", "transformers")}
    body = {"format": FORMAT_VERSION, "contents": list(contents), "recipe": recipe, "versions": versions}
    return hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).hexdigest()


def open_or_build(cache_dir: Path, key: str, build: Callable[[Path], None]) -> tuple[TokenStore, bool]:
    """The store of `key`, built by `build(folder)` unless it is there. Returns (store, was it built now).

    Safe to call from any number of processes at once. What `build` raises passes through and leaves nothing behind.
    """
    target = cache_dir / key
    store = open_store(target)
    if store is not None:
        return store, False
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / f"{key}.lock"):
            store = open_store(target)
            if store is not None:  # another process built it while this one waited
                return store, False
            with replacing(target) as folder:  # the lock's owner is the only writer
                build(folder)
    except OSError as e:
        reason = e.strerror or str(e)
        raise DataError(f"{cache_dir}: the token cache cannot be written: {reason}. Fix: set data.cache_dir") from e
    store = open_store(target)
    assert store is not None, f"{target} was just written"
    return store, True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "a+b") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield  # closing the handle releases the lock; the file stays, since unlinking it would race with waiters
