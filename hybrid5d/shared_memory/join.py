"""Making a group: who is on this host, the segment, and gloo where shared memory will not do.

The first group of a job meets through torch's store. Groups made later whose ranks all belong to it meet through its
segment: the first member publishes the new segment's address on its board, the others read it there.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
import platform
import re
import time
import warnings
from typing import Any

import torch.distributed as dist

from hybrid5d.shared_memory.channel import Channel, segment_size
from hybrid5d.shared_memory.endpoint import Endpoint, Members
from hybrid5d.shared_memory.group import SharedMemoryGroup
from hybrid5d.shared_memory.peers import Process, host_identity
from hybrid5d.shared_memory.progress import pace
from hybrid5d.shared_memory.segment import FOLDER, WORD, Segment

MAX_RANKS = 128
_ENTRIES, _ENTRY = 64, 8  # of a rank's board: one for each of the last groups that it was the first member of; words
_CALLS = """
    allreduce allreduce_coalesced reduce reduce_scatter broadcast allgather allgather_coalesced gather scatter alltoall
    barrier send recv recv_anysource
"""


def unavailable() -> str | None:
    """Why this process cannot use shared memory for collectives, or None."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        return f"needs the order of stores of x86 and Linux, this is {platform.system()} on {platform.machine()}"
    if not hasattr(os, "O_TMPFILE") or not os.path.isdir(FOLDER):
        return f"no {FOLDER}"
    absent = [name for name in _CALLS.split() if not hasattr(dist.ProcessGroup, name)]
    if absent or not hasattr(dist, "_Work"):
        return f"this torch has no ProcessGroup.{(absent or ['_Work'])[0]}"
    return None


class _Root:
    """The job's first group, where all of its ranks share this host: the meeting place of later ones."""

    def __init__(self, channel: Channel, members: Members, board: int):
        self.channel, self.members, self._board = channel, members, board
        self._made = 0
        self.index = {rank: k for k, rank in enumerate(members.ranks)}

    def _entry(self, k: int, i: int) -> int:
        return self._board + (k * _ENTRIES + i) * _ENTRY

    def publish(self, key: int, address: tuple[int, ...]) -> None:
        words, at = self.channel.words, self._entry(self.channel.rank, self._made % _ENTRIES)
        self._made += 1
        words[at] = 0
        for i, word in enumerate(address, start=1):
            words[at + i] = word
        words[at] = key

    def find(self, key: int, k: int, seconds: float) -> tuple[int, ...]:
        """The address that rank `k` published under this key."""
        words, begin, look = self.channel.words, time.monotonic(), 0.0
        while True:
            for i in range(_ENTRIES):
                at = self._entry(k, i)
                if words[at] == key:
                    return tuple(words[at + 1 : at + 6])
            waited = time.monotonic() - begin
            if waited > look + 0.25:
                look = waited
                if reason := self.members.watch.failure(k):
                    raise dist.DistBackendError(f"making a group: rank {self.members.ranks[k]} {reason}")
            if waited > seconds:
                raise dist.DistBackendError(f"making a group: rank {self.members.ranks[k]} did not come")
            time.sleep(1e-4)


_root: _Root | None = None


def create(options: Any, _: Any = None) -> SharedMemoryGroup:
    """Backend `shm`: shared memory, or an error that says why not."""
    made = _join(options)
    if isinstance(made, str):
        raise RuntimeError(f"backend shm: {made}; backend shm_or_gloo takes gloo where that happens")
    return made


_said: set[str] = set()  # why this process's groups went through gloo, each once


def create_or_gloo(options: Any, _: Any = None) -> Any:
    """Backend `shm_or_gloo`: shared memory where all ranks of the group share it, else gloo, with a notice why."""
    made = _join(options)
    if not isinstance(made, str):
        return made
    reason = re.sub(r"\d+", "#", made)  # groups of other sizes need other sizes
    if options.group_rank == 0 and reason not in _said:
        _said.add(reason)
        warnings.warn(f"collectives go through gloo where shared memory will not do: {made}", stacklevel=2)
    gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
    gloo._set_sequence_number_for_group()
    return gloo


def _join(options: Any) -> SharedMemoryGroup | str:
    """This rank's end of the group, or the reason, equal on all ranks, why there is none."""
    global _root
    rank, n, ranks = options.group_rank, options.group_size, list(options.global_ranks_in_group)
    first = not ranks
    timeout: datetime.timedelta = options.timeout
    if n == 1:
        return SharedMemoryGroup(None, rank, n, timeout)
    if first:
        _root = None
        ranks = list(range(n))
    if _root is not None and all(r in _root.index for r in ranks):
        made: tuple[Segment, Members] | str = _through_root(_root, options, ranks)
    else:
        made = _through_store(options.store, rank, n, ranks, first)
    if isinstance(made, str):
        return made
    segment, members = made
    channel = Channel(segment, rank, n)
    if first:
        _root = _Root(channel, members, segment_size(n) // WORD)
    return SharedMemoryGroup(Endpoint(channel, members), rank, n, timeout)


def _through_store(store: Any, rank: int, n: int, ranks: list[int], first: bool) -> tuple[Segment, Members] | str:
    """Rank 0 compares the hosts, makes the segment and gives the verdict when all have tried to map it."""
    why = unavailable()
    me = {"why": why} if why else {"host": host_identity(), "process": dataclasses.astuple(Process.this())}
    store.set(f"rank{rank}", json.dumps(me))
    size = segment_size(n) + (n * _ENTRIES * _ENTRY * WORD if first else 0)
    segment = None
    if rank == 0:
        everyone = [json.loads(store.get(f"rank{k}")) for k in range(n)]
        verdict: dict[str, Any] = {"why": _differing(everyone, ranks)}
        if verdict["why"] is None:
            try:
                segment, verdict["address"] = Segment.create(size)
                verdict["processes"] = [x["process"] for x in everyone]
            except OSError as exc:
                verdict["why"] = str(exc)
        store.set("verdict", json.dumps(verdict))
    verdict = json.loads(store.get("verdict"))
    if verdict["why"] is None:
        mapped = segment or _try_open(verdict["address"])
        verdict["why"] = _all_mapped(store, rank, n, mapped)
        segment = None if isinstance(mapped, str) else mapped
    if verdict["why"] is not None or segment is None:
        return str(verdict["why"])
    pace.settle(n)
    return segment, Members([Process(*p) for p in verdict["processes"]], ranks)


def _differing(everyone: list[dict[str, Any]], ranks: list[int]) -> str | None:
    if len(everyone) > MAX_RANKS:
        return f"{len(everyone)} ranks are more than {MAX_RANKS}"
    for rank, one in zip(ranks, everyone):
        if one.get("why"):
            return f"rank {rank}: {one['why']}"
        if one["host"] != everyone[0]["host"]:
            return f"ranks {ranks[0]} and {rank} are on two hosts"
    return None


def _try_open(address: list[int]) -> Segment | str:
    try:
        return Segment.open(tuple(address))
    except OSError as exc:
        return f"no common file: {exc}"


def _all_mapped(store: Any, rank: int, n: int, mapped: Segment | str) -> str | None:
    """Rank 0 hears from all and answers: None, or the first reason why one could not map the segment."""
    store.set(f"mapped{rank}", mapped if isinstance(mapped, str) else "")
    if rank == 0:
        answers = [store.get(f"mapped{k}").decode() for k in range(n)]
        store.set("answer", next((a for a in answers if a), ""))
    return store.get("answer").decode() or None


def _through_root(root: _Root, options: Any, ranks: list[int]) -> tuple[Segment, Members] | str:
    n, first = len(ranks), root.index[ranks[0]]
    name = f"{options.group_id} {ranks}"
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little") | 1
    members = Members(
        [root.members.processes[root.index[r]] for r in ranks], [root.members.ranks[root.index[r]] for r in ranks]
    )
    if options.group_rank == 0:
        try:
            segment, address = Segment.create(segment_size(n))
        except OSError as exc:
            root.publish(key, (0, 0, 0, 0, 0))
            return f"rank {ranks[0]}: {exc}"
        root.publish(key, address)
        return segment, members
    address = root.find(key, first, options.timeout.total_seconds())
    if not any(address):
        return f"rank {ranks[0]} has no room for a segment in {FOLDER}"
    return Segment.open(address), members
