"""What a rank does in one group: its collectives, its messages, and who of its peers still runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hybrid5d.shared_memory.channel import FAILED, LEFT, STATE, Channel
from hybrid5d.shared_memory.mailbox import Outbox, Post
from hybrid5d.shared_memory.peers import Process, Watch
from hybrid5d.shared_memory.progress import Need, Queue, deactivate

_LINGER = 10.0  # seconds that a rank which leaves waits for receivers that have not yet opened its mailbox


class Members:
    """The ranks of a group: their processes, and their global numbers for messages."""

    def __init__(self, processes: Sequence[Process], ranks: Sequence[int]):
        self.processes, self.ranks = tuple(processes), tuple(ranks)
        self.watch = Watch(self.processes)


class Endpoint:
    """What a rank does in one group. Implements `progress.Mover`."""

    def __init__(self, channel: Channel, members: Members):
        self.channel, self.members = channel, members
        self.error: Exception | None = None
        self.queue = Queue(self)
        self.talking = False  # whether a send or a receive is under way
        boxes = {k: Outbox(self._announcer(k)) for k in channel.others}
        self.post = Post(channel.rank, boxes, self._address)
        self.post.peers = channel.others

    def _announcer(self, target: int) -> Callable[[tuple[int, ...]], None]:
        def announce(address: tuple[int, ...]) -> None:
            at = self.channel.pair(self.channel.rank, target)
            for i, word in enumerate(address, start=1):
                self.channel.words[at + i] = word
            self.channel.words[at] = 1

        return announce

    def _address(self, source: int) -> tuple[int, ...] | None:
        at = self.channel.pair(source, self.channel.rank)
        return tuple(self.channel.words[at + 1 : at + 6]) if self.channel.words[at] == 1 else None

    def pump(self) -> None:
        if self.queue:
            self.queue.pump()
        if self.talking:
            try:
                self.post.pump()
            except Exception as exc:
                self.fail(exc)
            self.talking = self.post.busy()
        elif not self.queue:
            deactivate(self)

    def blockers(self, need: Need) -> Sequence[int]:
        return need[0] if need[1] < 0 else self.channel.blockers(need)

    def lost(self, peers: Sequence[int]) -> str | None:
        reasons = {k: reason for k in peers if (reason := self._failure(k))}
        if not reasons or (self._any_will_do(peers) and len(reasons) < len(peers)):
            return None
        k, reason = next(iter(reasons.items()))
        return f"rank {self.members.ranks[k]} (process {self.members.processes[k].pid}) {reason}"

    def _any_will_do(self, peers: Sequence[int]) -> bool:
        """A receive from anyone waits for the last peer that lives."""
        return peers is self.channel.others and not self.queue and len(peers) > 1

    def _failure(self, k: int) -> str | None:
        state = self.channel.words[self.channel.rows[k] + STATE]
        if state in (LEFT, FAILED):
            return "has left the group" if state == LEFT else "has given the group up"
        return self.members.watch.failure(k)

    def fail(self, error: Exception) -> None:
        self.error = error
        self.channel.leave(FAILED)
        self.queue.fail(error)
        self.post.fail(error)
        deactivate(self)

    def leave(self) -> None:
        """Say goodbye; first, peers that have messages in a mailbox they never opened get the time to open it."""
        end = time.monotonic() + _LINGER
        boxes = {k: box for k, box in self.post.outboxes.items() if self.error is None and box.unopened()}
        while any(box.unopened() and not self._failure(k) for k, box in boxes.items()) and time.monotonic() < end:
            time.sleep(1e-3)
        self.channel.leave(LEFT if self.error is None else FAILED)
        self.members.watch.close()
