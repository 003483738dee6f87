"""First-fit-decreasing packing of documents into rows of a fixed capacity."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PackPlan:
    """Which lengths share a row. Depends on the multiset of lengths alone, hence has equally many rows in every epoch.

    Attributes:
        by_length: [n] documents, longest first, equal lengths in natural order.
        lengths: [n] their lengths, descending.
        row_of: [n] the row that takes the document at that place of `by_length`.
        num_rows: rows in all.
        capacity: tokens that fit into a row.
    """

    by_length: np.ndarray
    lengths: np.ndarray
    row_of: np.ndarray
    num_rows: int
    capacity: int

    @property
    def fill_rate(self) -> float:
        """Tokens over places: 1.0 means no padding."""
        return float(self.lengths.sum()) / (self.num_rows * self.capacity) if self.num_rows else 1.0

    def rows(self, rank_in_epoch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(documents [n], bounds [num_rows + 1]): row r of the epoch holds `documents[bounds[r] : bounds[r + 1]]`.

        rank_in_epoch: [n] place of each document in the epoch's order. Documents of equal length change places by it,
        so that a document meets others in each epoch; inside a row documents stand in the epoch's order.
        """
        exchanged = self.by_length[np.lexsort((rank_in_epoch[self.by_length], -self.lengths))]
        documents = exchanged[np.lexsort((rank_in_epoch[exchanged], self.row_of))]
        bounds = np.zeros(self.num_rows + 1, dtype=np.int64)
        np.cumsum(np.bincount(self.row_of, minlength=self.num_rows), out=bounds[1:])
        return documents, bounds


def pack_first_fit_decreasing(lengths: np.ndarray, capacity: int) -> PackPlan:
    """Packs documents of `lengths` [n] (each in 1..capacity) into rows of `capacity` tokens.

    First fit gives a document to the first row with room for it. Equal documents fill a row before they pass on to the
    next, so one length is placed at a time: for m distinct lengths and r rows the work is O(m * r) vectorised steps.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    assert lengths.size == 0 or (lengths.min() >= 1 and lengths.max() <= capacity)
    by_length = np.lexsort((np.arange(lengths.size), -lengths))
    descending = lengths[by_length]
    row_of = np.empty(lengths.size, dtype=np.int64)
    room = np.empty(0, dtype=np.int64)  # places left in the rows that are open, in order of their creation
    row_ids = np.empty(0, dtype=np.int64)
    num_rows, done = 0, 0
    for length, count in zip(*(x[::-1] for x in np.unique(lengths, return_counts=True))):
        taken = _take_first(room // length, count)
        placed = np.repeat(row_ids, taken)
        room = room - taken * length
        missing = int(count - placed.size)
        if missing:
            per_row = int(capacity // length)
            fresh = -(-missing // per_row)
            fresh_ids = np.arange(num_rows, num_rows + fresh, dtype=np.int64)
            fresh_taken = np.full(fresh, per_row, dtype=np.int64)
            fresh_taken[-1] = missing - per_row * (fresh - 1)
            placed = np.concatenate([placed, np.repeat(fresh_ids, fresh_taken)])
            room = np.concatenate([room, capacity - fresh_taken * length])
            row_ids = np.concatenate([row_ids, fresh_ids])
            num_rows += fresh
        row_of[done : done + count] = placed
        done += int(count)
        if done < lengths.size:  # rows too full for the shortest document are closed
            still_open = room >= descending[-1]
            room, row_ids = room[still_open], row_ids[still_open]
    return PackPlan(by_length, descending, row_of, num_rows, capacity)


def _take_first(fits: np.ndarray, count: int) -> np.ndarray:
    """How many of `count` equal documents each row takes, first rows first, row i taking at most fits[i]."""
    before = np.cumsum(fits) - fits
    return np.clip(count - before, 0, fits)
