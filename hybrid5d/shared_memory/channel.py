"""Collectives over one segment: what is in it and how the ranks take turns.

Segment: the token; a row of words for each rank; an address for each ordered pair (where its mailbox is); two slots a
rank. A collective runs in phases: a rank writes its slot, then its phase number; who needs the data waits for that
number and reads. A rank begins phase p when all have begun p - 1, so all have finished reading p - 2, and successive
operations alternate between the two slots: what is being read is never written. Only x86's order of stores is relied
on (a store is seen after the stores before it: Intel SDM vol. 3A, 8.2.2; AMD64 APM vol. 2, 7.2).

Tensors here are contiguous and 1-D; `x`, `out` and parts are this rank's own memory. n = ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from hybrid5d.shared_memory.progress import Need
from hybrid5d.shared_memory.reduce import pairwise, reduce_into
from hybrid5d.shared_memory.segment import WORD, Segment

SMALL = 32 << 10  # bytes of a slot of the segment that every group has
LARGE = (512 << 10, 4 << 20)  # bytes of a slot of the segments that the first larger messages ask for
_LEAP = 1 << 20  # bytes of a message from which on it takes the largest slots
ROW = 16  # words
ADDRESS = 8  # words
# words of a row; a signature for each parity of the phase; for each size of larger slots an answer and an address
PHASE, SIGNATURE, STATE, GROWN, GROWN_WORDS = 0, 1, 3, 4, 6
JOINED, LEFT, FAILED = 1, 2, 3
_GROWING = -2  # in the place of a phase: level 0 of the larger slots; -3: level 1
_CALLS = "all_reduce reduce broadcast all_gather gather scatter reduce_scatter all_to_all barrier"
CODES = {name: i for i, name in enumerate(_CALLS.split(), start=1)}
_NAMES = {i: name for name, i in CODES.items()}

Run = Generator[Need, None, None]
Get = Generator[Need, None, Any]


def layout(n: int) -> tuple[int, int, int]:
    """Word of the first row, word of the first pair's address, byte of the first slot."""
    rows = ROW
    pairs = rows + n * ROW
    slots = -(-(pairs + n * n * ADDRESS) * WORD // 4096) * 4096
    return rows, pairs, slots


def segment_size(n: int) -> int:
    """Bytes of a group's first segment."""
    return layout(n)[2] + n * 2 * SMALL


class Slots:
    """Two slots for each of n ranks."""

    def __init__(self, data: Tensor, offset: int, n: int, size: int):
        self.size, self._turn = size, 0
        self._bytes = [
            [data[offset + (2 * k + s) * size : offset + (2 * k + s + 1) * size] for k in range(n)] for s in (0, 1)
        ]
        self._views: dict[tuple[int, torch.dtype, int], list[Tensor]] = {}

    def next(self, dtype: torch.dtype, numel: int) -> list[Tensor]:
        """The ranks' slots of the next turn, as tensors of this many elements."""
        self._turn ^= 1
        key = (self._turn, dtype, numel)
        views = self._views.get(key)
        if views is None:
            if len(self._views) > 200:
                self._views.clear()
            views = [x[: numel * dtype.itemsize].view(dtype) for x in self._bytes[self._turn]]
            self._views[key] = views
        return views


class Channel:
    """This rank's end of a group's shared memory."""

    def __init__(self, segment: Segment, rank: int, n: int):
        self.segment, self.rank, self.n = segment, rank, n
        self.words = segment.words
        first, pairs, slots = layout(n)
        self.rows = [first + k * ROW for k in range(n)]
        self._pairs, self.row = pairs, self.rows[rank]
        self.others = tuple(k for k in range(n) if k != rank)
        self._other_rows = tuple(self.rows[k] for k in self.others)
        self.phase = 0
        self._small = Slots(segment.data, slots, n, SMALL)
        self._large: list[Slots | None] = []  # by level, as far as they were asked for
        self._segments: list[Segment] = []
        self._plans: dict[tuple[torch.dtype, int, int], tuple[int, Callable[..., Tensor] | None]] = {}
        self.words[self.row + STATE] = JOINED

    def pair(self, source: int, target: int) -> int:
        """Word where the address of this pair's mailbox starts."""
        return self._pairs + (source * self.n + target) * ADDRESS

    def leave(self, state: int) -> None:
        self.words[self.row + STATE] = state

    # --- taking turns -------------------------------------------------------------------------------------------------

    def _until(self, peers: Sequence[int], phase: int) -> Run:
        words, rows, need = self.words, self.rows, (peers, phase)
        for k in peers:
            row = rows[k]
            while words[row] < phase:
                yield need

    def _begin(self) -> Run:
        """All have begun the phase before the next one."""
        return self._until(self.others, self.phase)

    def _publish(self, signature: int) -> None:
        self.phase += 1
        self.words[self.row + SIGNATURE + (self.phase & 1)] = signature
        self.words[self.row] = self.phase

    def _read(self, peers: Sequence[int], signature: int) -> Run:
        """The peers have published this phase, for the same operation.

        Raises:
            RuntimeError: one of them called something else.
        """
        yield from self._until(peers, self.phase)
        at = SIGNATURE + (self.phase & 1)
        for k in peers:
            if self.words[self.rows[k] + at] != signature:
                there, here = _describe(self.words[self.rows[k] + at]), _describe(signature)
                raise RuntimeError(f"group rank {k} called {there} where rank {self.rank} called {here}")

    def _slots(self, size: int) -> Get:
        """Slots for messages of `size` bytes, which must be the same on all ranks."""
        if size <= SMALL:
            return self._small
        level = int(size > _LEAP)
        while len(self._large) <= level:
            yield from self._grow(len(self._large))
        return self._large[level] or self._large[0] or self._small

    def _grow(self, level: int) -> Run:
        """Map larger slots; where there is no room for them on one rank, all stay with the smaller ones."""
        words, answer = self.words, GROWN + level * GROWN_WORDS
        first, size = self.rows[0] + answer, self.n * 2 * LARGE[level]
        segment, fine, need = None, 1, (self.others, _GROWING - level)
        if self.rank == 0:
            try:
                segment, address = Segment.create(size)
                for i, word in enumerate(address, start=1):
                    words[first + i] = word
            except OSError:
                fine = 2
        else:
            need_first = ((0,), _GROWING - level)
            while not words[first]:
                yield need_first
            try:
                segment = Segment.open(tuple(words[first + 1 : first + 6])) if words[first] == 1 else None
            except OSError:
                fine = 2
            if segment is not None and segment.size != size:
                raise RuntimeError(f"group rank 0 announced a segment of {segment.size} bytes")
        words[self.row + answer] = fine
        for k in self.others:
            while not words[self.rows[k] + answer]:
                yield need
        if segment is not None:
            segment.close_file()
        if segment is not None and all(words[row + answer] == 1 for row in self.rows):
            self._segments.append(segment)
            self._large.append(Slots(segment.data, 0, self.n, LARGE[level]))
        else:
            self._large.append(None)

    def blockers(self, need: Need) -> list[int]:
        """Peers that have not reached a phase, or not answered where the slots grow (phase _GROWING and below)."""
        peers, phase = need
        at = GROWN + (_GROWING - phase) * GROWN_WORDS if phase <= _GROWING else PHASE
        return [k for k in peers if self.words[self.rows[k] + at] < max(phase, 1)]

    # --- collectives --------------------------------------------------------------------------------------------------

    def barrier(self) -> Run:
        yield from self._begin()
        self._publish(_signature("barrier", 0))
        yield from self._read(self.others, _signature("barrier", 0))

    def all_reduce(self, x: Tensor, kind: Any) -> Run:
        """Two ranks, or little data: everyone reduces all of it. Else rank r reduces the r-th part and all copy it."""
        n, size = self.n, x.numel() * x.itemsize
        if size <= SMALL:
            yield from self._reduce_small(x, kind)
            return
        signature = _signature("all_reduce", size, x.dtype, kind)
        slots = yield from self._slots(size)
        step = slots.size // x.itemsize
        for start in range(0, x.numel(), step):
            piece = x if x.numel() <= step else x[start : start + step]
            yield from self._begin()
            views = slots.next(x.dtype, piece.numel())
            views[self.rank].copy_(piece)
            self._publish(signature)
            yield from self._read(self.others, signature)
            if n == 2:
                reduce_into(piece, [piece, views[1]] if self.rank == 0 else [views[0], piece], kind)
            else:
                yield from self._reduce_parts(piece, views, kind, signature)

    def _plan(self, dtype: torch.dtype, numel: int, kind: Any) -> tuple[int, Callable[..., Tensor] | None]:
        """Signature and function of a small all-reduce: looked up, as building them takes longer than the sum."""
        key = (dtype, numel, kind.value)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) > 200:
                self._plans.clear()
            simple = pairwise(kind, dtype) if self.n == 2 else None
            plan = self._plans[key] = _signature("all_reduce", numel * dtype.itemsize, dtype, kind), simple
        return plan

    def _reduce_small(self, x: Tensor, kind: Any) -> Run:
        """One slot holds it, everyone reduces all of it. Written out: its Python is what a small message costs."""
        if not x.numel():
            return
        (signature, simple), words, phase = self._plan(x.dtype, x.numel(), kind), self.words, self.phase
        for row in self._other_rows:
            if words[row] < phase:
                yield from self._begin()
                break
        views = self._small.next(x.dtype, x.numel())
        views[self.rank].copy_(x)
        self._publish(signature)
        phase += 1
        for row in self._other_rows:
            if words[row] < phase:
                yield from self._until(self.others, phase)
                break
        at = SIGNATURE + (phase & 1)
        for row in self._other_rows:
            if words[row + at] != signature:
                yield from self._read(self.others, signature)
        if simple is not None:
            simple(views[0], views[1], out=x)
        else:
            reduce_into(x, views, kind)

    def _reduce_parts(self, piece: Tensor, views: Sequence[Tensor], kind: Any, signature: int) -> Run:
        per = -(-piece.numel() // self.n)
        cuts = [slice(k * per, min((k + 1) * per, piece.numel())) for k in range(self.n)]
        mine = piece[cuts[self.rank]]
        reduce_into(mine, [v[cuts[self.rank]] for v in views], kind)
        views[self.rank][cuts[self.rank]].copy_(mine)
        yield from self._begin()
        self._publish(signature)
        yield from self._read(self.others, signature)
        for k in self.others:
            piece[cuts[k]].copy_(views[k][cuts[k]])

    def reduce(self, x: Tensor, root: int, kind: Any) -> Run:
        """The result is in the root's `x`; that of the others stays."""
        size = x.numel() * x.itemsize
        signature = _signature("reduce", size, x.dtype, kind, root)
        slots = yield from self._slots(size)
        step = slots.size // x.itemsize
        for start in range(0, x.numel(), step):
            piece = x[start : start + step]
            yield from self._begin()
            views = slots.next(x.dtype, piece.numel())
            views[self.rank].copy_(piece)
            self._publish(signature)
            if self.rank == root:
                yield from self._read(self.others, signature)
                reduce_into(piece, views, kind)

    def broadcast(self, x: Tensor, root: int) -> Run:
        signature = _signature("broadcast", x.numel(), root=root)
        slots = yield from self._slots(x.numel())
        for start in range(0, x.numel(), slots.size):
            piece = x[start : start + slots.size]
            yield from self._begin()
            view = slots.next(x.dtype, piece.numel())[root]
            if self.rank == root:
                view.copy_(piece)
            self._publish(signature)
            if self.rank != root:
                yield from self._read((root,), signature)
                piece.copy_(view)

    def gather(self, x: Tensor, outs: Sequence[Tensor] | None, root: int = -1) -> Run:
        """`outs[k]` = rank k's x, where `outs` is given: on the root, or on all (root -1). Bytes."""
        signature = _signature("all_gather" if root < 0 else "gather", x.numel(), root=max(root, 0))
        slots = yield from self._slots(x.numel())
        for start in range(0, x.numel(), slots.size):
            piece = x[start : start + slots.size]
            yield from self._begin()
            views = slots.next(x.dtype, piece.numel())
            if root != self.rank:
                views[self.rank].copy_(piece)
            self._publish(signature)
            if outs is None:
                continue
            mine = outs[self.rank][start : start + slots.size]
            if mine.data_ptr() != piece.data_ptr():
                mine.copy_(piece)
            yield from self._read(self.others, signature)
            for k in self.others:
                outs[k][start : start + slots.size].copy_(views[k])

    def scatter(self, out: Tensor, parts: Sequence[Tensor] | None, root: int) -> Run:
        """`out` = the root's parts[rank]. Bytes."""
        n, signature = self.n, _signature("scatter", out.numel(), root=root)
        slots = yield from self._slots(out.numel() * n)
        step = slots.size // n // 64 * 64
        for start in range(0, out.numel(), step):
            width = min(step, out.numel() - start)
            yield from self._begin()
            view = slots.next(out.dtype, n * step)[root]
            if parts is not None:
                for k in self.others:
                    view[k * step : k * step + width].copy_(parts[k][start : start + width])
            self._publish(signature)
            if parts is not None:
                out[start : start + width].copy_(parts[root][start : start + width])
            else:
                yield from self._read((root,), signature)
                out[start : start + width].copy_(view[self.rank * step : self.rank * step + width])

    def reduce_scatter(self, out: Tensor, parts: Sequence[Tensor], kind: Any) -> Run:
        """`out` = the reduction of the ranks' parts[rank]. `out` may be this rank's own part."""
        n, me, size = self.n, self.rank, out.itemsize
        signature = _signature("reduce_scatter", out.numel() * size, out.dtype, kind)
        slots = yield from self._slots(out.numel() * size * n)
        step = slots.size // n // 64 * 64 // size
        for start in range(0, out.numel(), step):
            width = min(step, out.numel() - start)
            yield from self._begin()
            views = slots.next(out.dtype, n * step)
            for k in range(n):
                if k != me or me > 1:  # `out` may be parts[me], and is written before a part after the second is read
                    views[me][k * step : k * step + width].copy_(parts[k][start : start + width])
            self._publish(signature)
            yield from self._read(self.others, signature)
            arrived = [v[me * step : me * step + width] for v in views]
            if me <= 1:
                arrived[me] = parts[me][start : start + width]
            reduce_into(out[start : start + width], arrived, kind)

    def all_to_all(self, outs: Sequence[Tensor], parts: Sequence[Tensor], even: bool = False) -> Run:
        """outs[k] = rank k's parts[rank]; any sizes. Bytes.

        `even`: no splits were given, so all parts are equal, also on the other ranks. Else the first turn carries
        everyone's sizes too.

        Raises:
            RuntimeError: a peer sends another size than is expected from it.
        """
        n, me, size = self.n, self.rank, parts[0].numel() if even else 0
        signature, start, table = _signature("all_to_all", n * size + even), 0, 0 if even else -(-n * WORD // 64) * 64
        slots = (yield from self._slots(n * size)) if even else self._small
        most = size if even else 1
        if even:
            outs[me].copy_(parts[me])
        while start < most:
            step = (slots.size - table) // n // 64 * 64
            yield from self._begin()
            views = slots.next(torch.uint8, slots.size)
            if not even and start == 0:
                sizes = torch.tensor([p.numel() for p in parts])
                views[me][: n * WORD].view(torch.int64).copy_(sizes)
            self._send_parts(views[me][table:], parts, start, step)
            self._publish(signature)
            yield from self._read(self.others, signature)
            if not even and start == 0:
                most = self._checked_sizes(views, outs)
                outs[me].copy_(parts[me])
            for k in self.others:
                width = min(step, outs[k].numel() - start)
                if width > 0:
                    at = table + me * step
                    outs[k][start : start + width].copy_(views[k][at : at + width])
            start += step
            if not even and start < most:
                slots = yield from self._slots(most)

    def _checked_sizes(self, views: Sequence[Tensor], outs: Sequence[Tensor]) -> int:
        """The largest part of all, where what the peers send is what is expected of them."""
        counts = [v[: self.n * WORD].view(torch.int64).tolist() for v in views]
        for k in range(self.n):
            if counts[k][self.rank] != outs[k].numel():
                text = f"group rank {k} sends {counts[k][self.rank]} bytes to {self.rank}, which expects"
                raise RuntimeError(f"all_to_all: {text} {outs[k].numel()}")
        return max(max(c) for c in counts)

    def _send_parts(self, slot: Tensor, parts: Sequence[Tensor], start: int, step: int) -> None:
        for k in self.others:
            width = min(step, parts[k].numel() - start)
            if width > 0:
                slot[k * step : k * step + width].copy_(parts[k][start : start + width])


_TYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
_CODE_OF = {dtype: i for i, dtype in enumerate(_TYPES)}
_SIZE = (1 << 38) - 1


def _signature(name: str, size: int, dtype: torch.dtype = torch.uint8, kind: Any = None, root: int = 0) -> int:
    """What a rank calls, in one word: name (5 bits), root (10), reduction (4), dtype (6), bytes (38)."""
    reduction = 0 if kind is None else kind.value + 1
    return CODES[name] << 58 | root << 48 | reduction << 44 | _CODE_OF[dtype] << 38 | size & _SIZE


def _describe(signature: int) -> str:
    name = _NAMES.get(signature >> 58, "nothing known")
    dtype = _TYPES[(signature >> 38 & 63) % len(_TYPES)]
    return f"{name} ({dtype}, {signature & _SIZE} bytes, root {signature >> 48 & 1023})"
