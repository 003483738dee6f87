"""Random numbers that are a function of where they are used: no generator, no state, no order of calls.

A token's noise depends on (seed, RL step, the prompt's place in the step, sample, position, token id). So a rank that
holds some columns of the vocabulary computes theirs, and neither layout nor batch changes a draw (counter-based
generators: Salmon et al. 2011).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

_GAMMA, _MIX1, _MIX2 = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_LOW = np.uint64(0xFFFFFFFF)


def _mix64(z: np.ndarray) -> np.ndarray:
    """SplitMix64's output function (Steele et al. 2014)."""
    z = (z ^ (z >> np.uint64(30))) * _MIX1
    z = (z ^ (z >> np.uint64(27))) * _MIX2
    return z ^ (z >> np.uint64(31))


def _words(z: np.ndarray) -> Tensor:
    """uint64 [n] -> its halves, int32 [n, 2]."""
    halves = np.stack((z & _LOW, z >> np.uint64(32)), -1).astype(np.uint32)
    return torch.from_numpy(halves.view(np.int32))


def sequence_keys(seed: int, step: int, places: Iterable[tuple[int, int]]) -> np.ndarray:
    """uint64 [n]: a key for each sequence, given as (the prompt's place in the RL step, number of its sample)."""

    def key(place: int, sample: int) -> int:
        text = f"{seed}:{step}:{place}:{sample}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    return np.array([key(*p) for p in places], dtype=np.uint64)


def position_words(keys: np.ndarray, position: int) -> Tensor:
    """int32 [n, 2]: what a row's noise is made from at one position of its response."""
    offset = np.uint64((position + 1) * int(_GAMMA) % (1 << 64))
    return _words(_mix64(keys + offset))


def id_words(start: int, count: int) -> Tensor:
    """int32 [count]: what a column's noise is made from; of the token ids from `start` on."""
    return _words(_mix64(np.arange(start + 1, start + count + 1, dtype=np.uint64) * _GAMMA))[:, 0].contiguous()


def log_survival(rows: Tensor, ids: Tensor) -> Tensor:
    """fp32 [n, v]: log(1 - u), u uniform in (0, 1), a number for each (row, id); minus it is an exponential draw.

    rows: int32 [n, 2] of `position_words`; ids: int32 [v] of `id_words`. Small u, which decide, have 31 bits.
    Two rounds of multiply and xor-shift; int32 products wrap.
    """
    x = ids + rows[:, :1]
    t = x >> 16
    x.bitwise_xor_(t.bitwise_and_(0xFFFF)).mul_(0x7FEB352D).bitwise_xor_(rows[:, 1:])
    torch.bitwise_right_shift(x, 15, out=t)
    x.bitwise_xor_(t.bitwise_and_(0x1FFFF)).mul_(0x846CA68B - (1 << 32)).bitwise_and_(0x7FFFFFFF)
    # + 1/2 keeps u above 0; the factor is a little above -2**-31, so that rounding never makes it 1
    return x.float().add_(0.5).mul_(-(2.0**-31) * (1 - 2.0**-24)).log1p_()
