"""Messages between two ranks: a ring of bytes for each ordered pair that talks.

A message travels as fragments, each a header (64 bytes: kind, tag, bytes of the message, bytes here) and its bytes. The
sender copies what fits. Where a wait for a send gets nowhere (nobody receives, or not for a millisecond), the sender
continues in a new, larger ring, whose address is the last entry of the old one: a send never waits for its receive.
The receiver checks every number that it reads before it uses it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from hybrid5d.shared_memory.progress import Work, pace
from hybrid5d.shared_memory.segment import PAGE, WORD, Segment

RING = 256 << 10  # bytes of a pair's first ring
_KEEP = 8 << 20  # a larger ring is given up once it is empty and small messages follow
UNIT = 64  # bytes of a header; payloads are rounded up to it
FRAGMENT = 64 << 10  # bytes of a message that are announced at once
WRITTEN, READ, OPENED, WANTED = 16, 32, 48, 64  # words of a ring's first page, a cache line each
_DATA, _CONTINUED = 1, 2


def _units(size: int) -> int:
    return -(-size // UNIT) * UNIT


class SendWork(Work):
    """A message on its way. `data`: its bytes."""

    data: Tensor
    sent: int
    tag: int
    started: bool


class Outbox:
    """The sender's end. `announce` publishes the address of the first ring."""

    def __init__(self, announce: Callable[[tuple[int, ...]], None]):
        self._announce = announce
        self.queue: deque[SendWork] = deque()
        self._ring: Segment | None = None
        self._capacity = self._written = 0
        self._unopened: list[Segment] = []
        self._seen = (0, 0.0)  # what the receiver had read, and since when

    def post(self, work: SendWork) -> None:
        self.queue.append(work)
        self.pump()

    def pump(self) -> None:
        if self._ring is None:
            self._ring = self._new_ring(RING)
        for ring in [r for r in self._unopened if r.words[OPENED]]:
            ring.close_file()
            self._unopened.remove(ring)
        if self.queue and not self.queue[0].started:
            self._fit(self.queue[0].data.numel())
        while self.queue and self._push(self.queue[0]):
            self.queue.popleft().done = True

    def _fit(self, size: int) -> None:
        """Before a message of this size: a ring that holds two, up to `_KEEP`; one that had to be larger goes."""
        assert self._ring is not None
        if self._capacity > _KEEP and size < RING and self._written == self._ring.words[READ]:
            self._continue(RING)
        elif self._capacity < min(size + 2 * UNIT, _KEEP):
            self._continue(min(2 * size + PAGE, _KEEP))

    def _new_ring(self, capacity: int, announce: Callable[[tuple[int, ...]], None] | None = None) -> Segment:
        ring, address = Segment.create(PAGE + capacity)
        self._unopened.append(ring)
        (announce or self._announce)(address)
        self._capacity, self._written, self._seen = ring.size - PAGE, 0, (0, 0.0)
        return ring

    def _free(self) -> int:
        assert self._ring is not None
        used = self._written - self._ring.words[READ]
        if not 0 <= used <= self._capacity:
            raise RuntimeError(f"a receiver's count of bytes read is off: {used} of {self._capacity} in use")
        return self._capacity - used

    def _push(self, work: SendWork) -> bool:
        """Copy as much of a message as fits; True where that was the rest of it."""
        ring, total = self._ring, work.data.numel()
        assert ring is not None
        while not work.started or work.sent < total:
            free = self._free() - 2 * UNIT  # this header, and room for the address of the next ring
            at = (self._written + UNIT) % self._capacity
            length = min(total - work.sent, free, FRAGMENT, self._capacity - at)
            if free < 0 or (length <= 0 < total):
                return False
            self._header(_DATA, work.tag, total, length)
            if length:
                ring.data[PAGE + at : PAGE + at + length].copy_(work.data[work.sent : work.sent + length])
            work.sent += length
            work.started = True
            self._written += UNIT + _units(length)
            ring.words[WRITTEN] = self._written
            pace.moves += 1
        return True

    def _header(self, *values: int) -> None:
        assert self._ring is not None
        at = (PAGE + self._written % self._capacity) // WORD
        for i, value in enumerate(values):
            self._ring.words[at + i] = value

    def stalled(self) -> None:
        """A wait for a send gets nowhere: go on in a larger ring, unless the receiver is reading."""
        ring = self._ring
        if ring is None or not self.queue:
            return
        read, now = ring.words[READ], time.monotonic()
        if read != self._seen[0] or not self._seen[1]:
            self._seen = read, now
        if ring.words[WANTED] and now - self._seen[1] < pace.patience:
            return
        waiting = sum(w.data.numel() - w.sent + 2 * UNIT for w in self.queue)
        self._continue(max(2 * self._capacity, waiting + waiting // FRAGMENT * 2 * UNIT + PAGE))
        self.pump()

    def _continue(self, capacity: int) -> None:
        """Go on in a new ring of this many bytes, where there is room for it."""
        old, written, size = self._ring, self._written, self._capacity
        assert old is not None

        def continued(address: tuple[int, ...]) -> None:
            at = (PAGE + written % size) // WORD
            for i, value in enumerate((_CONTINUED, *address)):
                old.words[at + i] = value
            old.words[WRITTEN] = written + UNIT

        try:
            self._ring = self._new_ring(capacity, continued)
        except OSError:
            self._seen = old.words[READ], time.monotonic()  # no room: the receiver makes some

    def unopened(self) -> bool:
        """Whether the receiver has still to open a ring, which it does through this process."""
        return any(not ring.words[OPENED] for ring in self._unopened)


class Message:
    """A message that arrives: its tag, where its bytes go, and how many are there."""

    def __init__(self, source: int, tag: int, target: Tensor, work: Work | None):
        self.source, self.tag, self.target, self.work = source, tag, target, work
        self.arrived = 0


class Inbox:
    """The receiver's end. `address` gives the first ring's address once there is one."""

    def __init__(
        self,
        address: Callable[[], tuple[int, ...] | None],
        match: Callable[[int, int], Message],
    ):
        self._address, self._match = address, match
        self._ring: Segment | None = None
        self._capacity = self._read = 0
        self.message: Message | None = None

    def want(self, wanted: bool) -> None:
        """Show the sender that a receive waits."""
        if self._ring is not None:
            self._ring.words[WANTED] = int(wanted)

    def _open(self, address: tuple[int, ...]) -> None:
        ring = Segment.open(address)
        ring.words[OPENED] = ring.words[WANTED] = 1
        self._ring, self._capacity, self._read = ring, ring.size - PAGE, 0

    def step(self) -> Message | None:
        """Take one fragment, if there is one; the message that it belongs to."""
        if self._ring is None:
            address = self._address()
            if address is None:
                return None
            self._open(address)
        ring, read, capacity = self._ring, self._read, self._capacity
        assert ring is not None
        there = ring.words[WRITTEN] - read
        if not 0 <= there <= capacity or there % UNIT:
            raise RuntimeError(f"a sender's count of bytes written is off: {there} of {capacity}")
        if there == 0:
            return None
        at = (PAGE + read % capacity) // WORD
        kind, *values = ring.words[at : at + 6].tolist()
        if kind == _CONTINUED:
            self._open(tuple(values))
            return self.step()
        tag, total, length = values[:3]
        message = self.message or self._match(tag, total)
        begin = (read + UNIT) % capacity
        left = message.target.numel() - message.arrived
        sane = kind == _DATA and tag == message.tag and total == message.target.numel() and 0 <= length <= left
        if not sane or UNIT + length > there or begin + length > capacity:
            raise RuntimeError(f"a message's header is off: {kind, tag, total, length}")
        message.target[message.arrived : message.arrived + length].copy_(
            ring.data[PAGE + begin : PAGE + begin + length]
        )
        message.arrived += length
        self._read += UNIT + _units(length)
        ring.words[READ] = self._read
        pace.moves += 1
        self.message = None if message.arrived == total else message
        return message


class Post:
    """All messages of one group at one rank: what is on its way out, what is waited for, what came unasked."""

    def __init__(self, rank: int, outboxes: dict[int, Outbox], address: Callable[[int], tuple[int, ...] | None]):
        self.rank, self.outboxes, self._address = rank, outboxes, address
        self._inboxes: dict[int, Inbox] = {}
        self._posted: list[tuple[Work, int | None, int, Tensor]] = []  # work, source or any, tag, bytes
        self._unasked: list[Message] = []
        self.peers: tuple[int, ...] = ()

    def receive(self, work: Work, source: int | None, tag: int, target: Tensor) -> None:
        for i, message in enumerate(self._unasked):
            whole = message.arrived == message.target.numel()
            if whole and source in (None, message.source) and tag == message.tag:
                del self._unasked[i]
                self._check(message.source, tag, message.target.numel(), target)
                target.copy_(message.target)
                work.source, work.done = message.source, True
                return
        self._posted.append((work, source, tag, target))
        for k in self.peers if source is None else (source,):
            if k not in self._inboxes:
                self._inboxes[k] = self._new_inbox(k)
            self._inboxes[k].want(True)
        self.pump()

    def _new_inbox(self, source: int) -> Inbox:
        def match(tag: int, total: int) -> Message:
            for i, (work, wanted, t, target) in enumerate(self._posted):
                if wanted in (None, source) and t == tag:
                    self._check(source, tag, total, target)
                    del self._posted[i]
                    return Message(source, tag, target, work)
            if not 0 <= total < 1 << 48:
                raise RuntimeError(f"a message of {total} bytes is announced")
            message = Message(source, tag, torch.empty(total, dtype=torch.uint8), None)
            self._unasked.append(message)
            return message

        return Inbox(lambda: self._address(source), match)

    @staticmethod
    def _check(source: int, tag: int, total: int, target: Tensor) -> None:
        if total != target.numel():
            text = f"group rank {source} sent {total} bytes (tag {tag}), and {target.numel()} are to be received"
            raise RuntimeError(text)

    def pump(self) -> None:
        for outbox in self.outboxes.values():
            if outbox.queue:
                outbox.pump()
        for source, inbox in self._inboxes.items():
            while self._wanted(source, inbox):
                message = inbox.step()
                if message is None:
                    break
                if message.arrived == message.target.numel():
                    self._arrived(message)
            else:
                inbox.want(False)

    def _arrived(self, message: Message) -> None:
        """Complete its receive; one that was posted while it came unasked is looked for now."""
        if message.work is None:
            for i, (work, wanted, tag, target) in enumerate(self._posted):
                if wanted in (None, message.source) and tag == message.tag:
                    self._check(message.source, tag, message.target.numel(), target)
                    target.copy_(message.target)
                    message.work = work
                    self._unasked.remove(message)
                    del self._posted[i]
                    break
        if message.work is not None:
            message.work.source, message.work.done = message.source, True

    def _wanted(self, source: int, inbox: Inbox) -> bool:
        if inbox.message is not None and inbox.message.work is not None:
            return True
        return any(wanted in (None, source) for _, wanted, _, _ in self._posted)

    def busy(self) -> bool:
        """Whether a send or a receive is under way."""
        if self._posted or any(box.queue for box in self.outboxes.values()):
            return True
        return any(box.message is not None and box.message.work is not None for box in self._inboxes.values())

    def fail(self, error: Exception) -> None:
        works = [work for work, *_ in self._posted] + [w for box in self.outboxes.values() for w in box.queue]
        works += [b.message.work for b in self._inboxes.values() if b.message and b.message.work]
        for work in works:
            work.error, work.done = error, True
        self._posted.clear()
        for box in self.outboxes.values():
            box.queue.clear()
