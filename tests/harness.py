"""`check.ranks.run_ranks` as tests use it: their own image, and the backend that TEST_BACKEND says."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hybrid5d.check import ranks
from hybrid5d.check.ranks import RankFailure as RankFailure


def run_ranks(
    world: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0, backend: str | None = None
) -> list[Any]:
    """Results of `fn(rank, *args)`, joined in one process group of `backend`, else `fn.backend`, else TEST_BACKEND."""
    name = backend or getattr(fn, "backend", None) or os.environ.get("TEST_BACKEND", "shm")
    return ranks.run_ranks(world, fn, *args, timeout=timeout, backend=name, preload="tests.preload")
