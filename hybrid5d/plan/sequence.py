"""How a micro-batch's tokens are cut over the context-parallel ranks, and what each rank computes.

`cp = ulysses * ring`, `cp_rank = ring_rank * ulysses + ulysses_rank`: the ranks of one Ulysses group are neighbours and
together hold one ring rank's tokens in order. `p2p` and `all_gather` are ring = cp, `a2a` is ulysses = cp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from hybrid5d.plan.sequence_blocks import Block, Segment, blocks_between, mark_first

METHODS = ("p2p", "a2a", "a2a+p2p", "all_gather")
LOAD_BALANCES = ("zigzag", "contiguous")
Documents = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Step:
    """Attention of one ring rank's queries against the keys of ring rank `source`; no blocks = all masked."""

    source: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True, eq=False)
class SequencePlan:
    """The cut of one micro-batch. Build it with `SequencePlan.build`, which caches; compare by identity.

    Attributes:
        documents: lengths of the documents of every row, as given.
        cp, ulysses, ring: degrees, cp = ulysses * ring.
        method: one of METHODS.
        packed: rows are flattened to batch 1 and documents do not see each other.
        batch: rows after flattening: b of every tensor.
        local_length: S/cp, equal on all ranks.
        padded: padded length of each attention document: one (the longest row) unless packed.
        cache: for tensors derived from the plan (index tensors, masks); keys are the user's.
    """

    documents: Documents
    cp: int
    ulysses: int
    ring: int
    method: str
    load_balance: str
    packed: bool
    batch: int
    local_length: int
    padded: tuple[int, ...]
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def build(
        cls,
        documents: Sequence[Sequence[int]],
        cp: int = 1,
        method: str = "p2p",
        ulysses: int = 1,
        load_balance: str = "zigzag",
        multiple: int = 1,
        packed: bool = False,
    ) -> SequencePlan:
        """Plan the cut; equal arguments give the same object.

        Args:
            documents: per row, the lengths of its documents (not packed: they are one sequence).
            ulysses: Ulysses degree of `a2a+p2p`; the other methods determine it themselves.
            multiple: what S/cp must be a multiple of (tp, with sequence parallelism).

        Raises:
            ValueError: unknown method or balance, or a Ulysses degree that does not divide cp.
        """
        rows = tuple(tuple(int(n) for n in row) for row in documents)
        return _build(rows, cp, method, ulysses, load_balance, multiple, packed)

    @property
    def length(self) -> int:
        """S: the padded length of a row over all ranks."""
        return self.local_length * self.cp

    @property
    def ring_length(self) -> int:
        """S/ring: what one rank attends with after the Ulysses exchange."""
        return self.local_length * self.ulysses

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch, padding not counted."""
        return sum(map(sum, self.documents))

    def segments(self, ring_rank: int) -> tuple[tuple[Segment, ...], ...]:
        """Per attention document, its pieces on a ring rank, ascending."""
        key = ("segments", ring_rank)
        if key not in self.cache:
            result, offset = [], 0
            for padded in self.padded:
                result.append(self._pieces(ring_rank, padded, offset))
                offset += padded // self.ring
            self.cache[key] = tuple(result)
        return self.cache[key]

    def _pieces(self, ring_rank: int, padded: int, offset: int) -> tuple[Segment, ...]:
        chunks = self._chunks(ring_rank)
        size = padded // (self.ring * len(chunks))
        return tuple(Segment(c * size, size, offset + i * size) for i, c in enumerate(chunks) if size)

    def _chunks(self, ring_rank: int) -> tuple[int, ...]:
        if self.ring > 1 and self.load_balance == "zigzag":
            return ring_rank, 2 * self.ring - 1 - ring_rank
        return (ring_rank,)

    def source_index(self, cp_rank: int) -> np.ndarray:
        """[b, S/cp] int64: index into the row's concatenated tokens (packed: the micro-batch's); -1 = padding."""
        key = ("source_index", cp_rank)
        if key not in self.cache:
            ring_rank, part = divmod(cp_rank, self.ulysses)
            whole = np.full((self.batch, self.ring_length), -1, dtype=np.int64)
            if self.packed:
                base = 0
                for segments, n in zip(self.segments(ring_rank), [n for row in self.documents for n in row]):
                    _fill(whole[0], segments, n, base)
                    base += n
            else:
                for row, lengths in zip(whole, self.documents):
                    _fill(row, self.segments(ring_rank)[0], sum(lengths), 0)
            mine = whole[:, part * self.local_length : (part + 1) * self.local_length]
            self.cache[key] = np.ascontiguousarray(mine)
        return self.cache[key]

    def natural_index(self) -> tuple[np.ndarray, ...]:
        """Per row (packed: one), for each of its tokens the index into the flattened [cp, b, S/cp] of all ranks."""
        if "natural_index" not in self.cache:
            everywhere = np.stack([self.source_index(r) for r in range(self.cp)])  # [cp, b, S/cp]
            flat = np.arange(everywhere.size).reshape(everywhere.shape)
            result = []
            for row in range(self.batch):
                source, place = everywhere[:, row].ravel(), flat[:, row].ravel()
                index = np.empty(int((source >= 0).sum()), dtype=np.int64)
                index[source[source >= 0]] = place[source >= 0]
                result.append(index)
            self.cache["natural_index"] = tuple(result)
        return self.cache["natural_index"]

    def steps(self, ring_rank: int, window: int | None = None, strips: bool = True) -> tuple[Step, ...]:
        """The attention program of a ring rank: own keys first, then those of rank-1, rank-2, ... (mod ring).

        `strips`: a window's band is cut into small blocks, for kernels that need a mask of it; else it is one block of
        each pair of segments, and all documents have it, so that they are one call.
        """
        key = ("steps", ring_rank, window, strips)
        if key not in self.cache:
            mine = self.segments(ring_rank)
            sources = [(ring_rank - i) % self.ring for i in range(self.ring)]
            program = []
            for source in sources:
                blocks: list[Block] = []
                for length, q, k in zip(self.padded, mine, self.segments(source)):
                    limit = _effective(window, length if strips else max(self.padded))
                    blocks += blocks_between(q, k, limit, strips)
                program.append(blocks)
            marked = program if window is None else mark_first(program, self.ring_length)
            self.cache[key] = tuple(Step(s, tuple(b)) for s, b in zip(sources, marked))
        return self.cache[key]

    def sees(self, ring_rank: int, source: int, window: int | None = None) -> bool:
        """Does anything on a ring rank attend to keys of `source`?"""
        lengths = tuple(sorted(set(self.padded)))
        return any(
            blocks_between(self._pieces(ring_rank, n, 0), self._pieces(source, n, 0), _effective(window, n))
            for n in lengths
        )

    def hops(self, window: int | None = None) -> int:
        """How far keys must travel round the ring: the last step at which any rank computes something."""
        key = ("hops", window)
        if key not in self.cache:
            ranks = range(self.ring)
            useful = (i for i in ranks if any(self.sees(r, (r - i) % self.ring, window) for r in ranks))
            self.cache[key] = max(useful, default=0)
        return self.cache[key]

    def scores(self, cp_rank: int, window: int | None = None) -> int:
        """Scores computed by a rank per row and per `1/ulysses` of the heads, summed over its program."""
        program = self.steps(cp_rank // self.ulysses, window)
        return sum(block.scores for step in program for block in step.blocks)


def _fill(row: np.ndarray, segments: tuple[Segment, ...], tokens: int, base: int) -> None:
    for s in segments:
        valid = max(0, min(s.stop, tokens) - s.start)
        row[s.offset : s.offset + valid] = base + s.start + np.arange(valid)


def _effective(window: int | None, length: int) -> int | None:
    return None if window is None or window >= length else window


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@lru_cache(maxsize=512)
def _build(
    rows: Documents,
    cp: int,
    method: str,
    ulysses: int,
    load_balance: str,
    multiple: int,
    packed: bool,
) -> SequencePlan:
    if method not in METHODS:
        raise ValueError(f"cp_comm_type={method!r}: one of {', '.join(METHODS)}")
    if load_balance not in LOAD_BALANCES:
        raise ValueError(f"cp_load_balance={load_balance!r}: one of {', '.join(LOAD_BALANCES)}")
    ulysses = {"a2a": cp, "a2a+p2p": ulysses}.get(method, 1)
    if ulysses < 1 or cp % ulysses:
        raise ValueError(f"ulysses={ulysses}: must divide context_parallel_size={cp}")
    ring = cp // ulysses
    chunk = 2 * ring if ring > 1 and load_balance == "zigzag" else ring
    lengths = [n for row in rows for n in row] if packed else [max((sum(row) for row in rows), default=0)]
    padded = tuple(_round_up(n, chunk) for n in lengths)
    needed = max(sum(padded), 1)
    # the tail beyond the documents attends to nothing
    ring_length = _round_up(-(-needed // ring), ulysses * multiple)
    return SequencePlan(
        documents=rows,
        cp=cp,
        ulysses=ulysses,
        ring=ring,
        method=method,
        load_balance=load_balance,
        packed=packed,
        batch=1 if packed else len(rows),
        local_length=ring_length // ulysses,
        padded=padded,
    )
