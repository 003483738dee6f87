"""Peers that die, stop or leave; what killed ranks leave behind; no room; hosts that differ."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hybrid5d.shared_memory as shm
from hybrid5d.check import ranks
from hybrid5d.shared_memory import join, peers, segment
from hybrid5d.shared_memory.mailbox import READ, WRITTEN
from tests.harness import RankFailure, run_ranks


def on(backend: str) -> Any:
    def mark(fn: Any) -> Any:
        fn.backend = backend
        return fn

    return mark


def _gone(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        dist.destroy_process_group()
        time.sleep(60)


@on("shm")
def _waits_for(rank: int, how: str, call: str, seen: Path) -> None:
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        _gone(how)
    x = torch.ones(100)
    with pytest.raises(dist.DistBackendError, match=r"rank 1 .*(gone|stopped|left)|rank 0 .*given"):
        dist.recv(x, src=1) if call == "recv" and rank == 0 else dist.all_reduce(x)
    with pytest.raises(dist.DistBackendError, match="cannot be used any more"):
        dist.all_reduce(x)
    seen.touch()
    os._exit(7)


@pytest.mark.parametrize("call", ["all_reduce", "recv"])
@pytest.mark.parametrize("how", ["killed", "stopped", "left"])
def test_a_wait_for_a_lost_peer_ends(how: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 leaves a file where it saw what it should; rank 1 gives no result. The group would wait for minutes."""
    if how == "killed":
        monkeypatch.setattr(ranks, "_GRACE", 30.0)  # what a rank gets to end after another one died
    with pytest.raises(RankFailure, match="died without a message"):
        run_ranks(2, _waits_for, how, call, tmp_path / "seen", timeout=40)
    assert (tmp_path / "seen").exists()


def _free() -> int:
    room = os.statvfs(segment.FOLDER)
    return room.f_bavail * room.f_frsize


@on("shm")
def _killed_at(rank: int, delay: float) -> None:
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if segment.FOLDER in line]
    assert mapped and all(line.endswith("(deleted)") for line in mapped), mapped
    end = time.monotonic() + delay
    while True:
        for group in groups:
            dist.all_reduce(torch.ones(20_000), group=group)
        if time.monotonic() > end:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("runs", [5, pytest.param(100, marks=pytest.mark.full)])
def test_killed_ranks_leave_nothing(runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two SIGKILLs a run. Segments have no name: nothing to remove, nothing that a second run could take."""
    monkeypatch.setattr(ranks, "_GRACE", 0.05)
    free = _free()
    for i in range(runs):
        with pytest.raises(RankFailure, match="died without a message"):
            run_ranks(2, _killed_at, 0.01 * (i % 10), timeout=20)
    end = time.monotonic() + 60
    while _free() < free - (4 << 20):  # others use the folder, too: at some moment they hold no more than before
        assert time.monotonic() < end
        time.sleep(0.2)


@on("shm_or_gloo")
def _uses(rank: int) -> bool:
    x = torch.full((3,), rank + 1.0)
    dist.all_reduce(x)
    assert x.tolist() == [3.0] * 3
    pair = dist.new_group([0, 1])
    dist.barrier(group=pair)
    return shm.uses_shared_memory()


def _no_room(size: int) -> Any:
    raise segment.NoRoom("/dev/shm has 0 KiB free")


def test_auto_takes_shared_memory_on_one_host() -> None:
    assert run_ranks(2, _uses) == [True, True]


@pytest.mark.parametrize("what", ["hosts", "room", "machine"])
def test_auto_takes_gloo_with_a_notice(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The creator's decision, without processes: both ranks' answers are in the store."""
    store = dist.HashStore()
    if what == "room":
        monkeypatch.setattr(segment.Segment, "create", _no_room)
    if what == "machine":
        monkeypatch.setattr(join.platform, "machine", lambda: "aarch64")
    if what == "hosts":
        monkeypatch.setattr(join, "_differing", lambda everyone, ranks: "ranks 0 and 1 are on two hosts")
    store.set("rank1", json.dumps({"host": peers.host_identity(), "process": [1, 1]}))
    found = join._through_store(store, 0, 2, [0, 1], True)
    assert isinstance(found, str)
    assert {"hosts": "two hosts", "room": "0 KiB free", "machine": "aarch64"}[what] in found


def test_hosts_differ_by_node_rank_and_by_network(monkeypatch: pytest.MonkeyPatch) -> None:
    here = peers.host_identity()
    monkeypatch.setenv("GROUP_RANK", "1")
    assert peers.host_identity() != here
    monkeypatch.delenv("GROUP_RANK")
    assert peers.host_identity() == here


def test_an_address_that_is_not_the_announced_file_is_refused() -> None:
    _made, address = segment.Segment.create(8192)
    assert segment.Segment.open(address).words[0] == address[-1]
    for i in range(2, 5):  # inode, size, token
        wrong = tuple(v + (4096 if k == i else 0) for k, v in enumerate(address))
        with pytest.raises(OSError):
            segment.Segment.open(wrong)
    with pytest.raises(OSError, match="no address"):
        segment.Segment.open((-1, 0, 0, 0, 0))


def test_a_full_folder_is_an_error_before_the_first_write(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(segment.NoRoom, match="free"):
        segment.Segment.create(1 << 50)


@on("shm")
def _corrupt(rank: int) -> None:
    dist.send(torch.ones(2), dst=1) if rank == 0 else dist.recv(torch.ones(2), src=0)
    dist.barrier()
    if rank == 0:
        end = dist.group.WORLD._end
        end.post.outboxes[1]._ring.words[WRITTEN] = 1 << 40
        time.sleep(3)
    else:
        time.sleep(0.3)
        dist.recv(torch.ones(2), src=0)


def test_a_count_out_of_range_is_refused() -> None:
    assert WRITTEN != READ
    with pytest.raises(RankFailure, match="bytes written is off"):
        run_ranks(2, _corrupt, timeout=20)


def test_strict_backend_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "_join", lambda options: "ranks 0 and 1 are on two hosts")
    with pytest.raises(RuntimeError, match="two hosts; backend shm_or_gloo"):
        join.create(None)
