"""Row order: a function of (seed, epoch, number of rows) alone."""

from __future__ import annotations

import numpy as np

_MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    """splitmix64's finaliser on one Python integer."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def epoch_order(num_rows: int, *, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """[num_rows] int64 permutation of the rows for one epoch; the natural order if not `shuffle`.

    Rows are sorted by a hash of (seed, epoch, row), written out here rather than taken from numpy's generators, whose
    streams may change between numpy versions: an order must outlive an upgrade for a resumed run to see the same rows.
    """
    if not shuffle:
        return np.arange(num_rows, dtype=np.int64)
    key = np.uint64(_mix(_mix(seed & _MASK) ^ (epoch & _MASK)))
    x = np.arange(num_rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key  # wraps modulo 2**64
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return np.argsort(x, kind="stable").astype(np.int64, copy=False)
