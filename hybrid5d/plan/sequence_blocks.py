"""Which rectangles of the score matrix a rank computes against one block of keys: pure geometry, no tensors.

Positions count inside a document; offsets count inside the ring rank's local sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

MAX_STRIP = 256  # rows of a sliding-window strip: its mask is [strip, window + strip], never [S, S]
MIN_STRIP = 64


@dataclass(frozen=True)
class Segment:
    """A run of consecutive positions of one document as it lies in a rank's local sequence."""

    start: int  # position of the first token in its document
    length: int
    offset: int  # where it lies in the local sequence

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Block:
    """One kernel call: queries [q0, q1) against keys [k0, k1), both local offsets.

    Attributes:
        kind: `full` = no mask; `causal` = square, row i sees keys 0..i; `band` = row i sees key j where
            `0 <= i - j + shift < window`. No row of a block is ever masked completely.
        first: no earlier block of this rank's program touches these rows, so the result is stored, not merged.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    kind: str
    shift: int = 0
    window: int = 0
    first: bool = False

    @property
    def rows(self) -> slice:
        return slice(self.q0, self.q1)

    @property
    def keys(self) -> slice:
        return slice(self.k0, self.k1)

    @property
    def tensors(self) -> tuple[()]:
        """A block needs none on the device (see `kernels.base.Call`)."""
        return ()

    def placed(self, there: object) -> Block:
        return self

    @property
    def scores(self) -> int:
        """Scores that the mask leaves."""
        rows, keys = self.q1 - self.q0, self.k1 - self.k0
        if self.kind == "full":
            return rows * keys
        if self.kind == "causal":
            return rows * (rows + 1) // 2
        newest = np.arange(rows) + self.shift
        return int((np.minimum(newest, keys - 1) - np.maximum(newest - self.window + 1, 0) + 1).sum())


def blocks_between(
    queries: tuple[Segment, ...], keys: tuple[Segment, ...], window: int | None, strips: bool = True
) -> list[Block]:
    """Blocks of one document between a rank's queries and a (same or other) rank's keys; empty where all is masked.

    Segments are equal chunks of the document in ascending order, so two of them are identical or disjoint.
    """
    if not queries or not keys:
        return []
    if window is not None:
        return [b for q in queries for k in keys for b in _band_blocks(q, k, window, strips)]
    if queries == keys:  # ascending positions on both sides: causal in local order as well
        start, stop = queries[0].offset, queries[-1].offset + queries[-1].length
        return [Block(start, stop, start, stop, "causal", first=True)]
    blocks: list[Block] = []
    for q in queries:
        seen = [k for k in keys if k.start < q.start]
        if not seen:
            continue
        block = Block(q.offset, q.offset + q.length, seen[0].offset, seen[-1].offset + seen[-1].length, "full")
        if blocks and blocks[-1].k1 == block.k1:  # both halves of the queries see the same keys: one call
            block = replace(blocks.pop(), q1=block.q1)
        blocks.append(block)
    return blocks


def _band_blocks(q: Segment, k: Segment, window: int, strips: bool) -> list[Block]:
    first, stop = max(q.start, k.start), min(q.stop, k.stop + window - 1)
    strip = max(MIN_STRIP, min(MAX_STRIP, window)) if strips else max(stop - first, 1)
    blocks = []
    for top in range(first, stop, strip):
        end = min(top + strip, stop)
        oldest, newest = max(k.start, top - window + 1), min(k.stop, end)
        full = strips and newest - 1 <= top and oldest > end - 1 - window
        blocks.append(
            Block(
                q0=q.offset + top - q.start,
                q1=q.offset + end - q.start,
                k0=k.offset + oldest - k.start,
                k1=k.offset + newest - k.start,
                kind="full" if full else "band",
                shift=0 if full else top - oldest,
                window=0 if full else window,
            )
        )
    return blocks


def mark_first(program: list[list[Block]], length: int) -> list[tuple[Block, ...]]:
    """Set `first` on blocks whose rows nothing before them in the program has touched (needed with windows only:
    else the own keys come first, for all rows)."""
    touched = np.zeros(length, dtype=bool)
    marked = []
    for blocks in program:
        done = []
        for block in blocks:
            done.append(replace(block, first=not touched[block.q0 : block.q1].any()))
            touched[block.q0 : block.q1] = True
        marked.append(tuple(done))
    return marked
