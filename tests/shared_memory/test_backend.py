"""The backend against models: every operation, exact sums, odd tensors, messages, groups of one, refusals."""

from __future__ import annotations

import datetime
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hybrid5d.shared_memory as shm
from tests.harness import RankFailure, run_ranks
from tests.shared_memory.stress import stress


def on_shm(fn: Any) -> Any:
    fn.backend = "shm"
    return fn


@pytest.mark.parametrize("seed", [11, 12])
def test_random_operations_equal_their_model(seed: int) -> None:
    """The short form of `python -m tests.shared_memory.stress`."""
    run_ranks(4, stress, 4, seed, 1.0)


@on_shm
def _sums(rank: int, n: int) -> None:
    """fp16: 2048 + 1 + 1 … is 2048 where every sum is rounded to 16 bits. fp32: an order that shows."""
    x = torch.full((70_001,), 2048.0 if rank == 0 else 1.0, dtype=torch.float16)
    dist.all_reduce(x)
    assert (x == torch.tensor(2048.0 + n - 1).half()).all()
    parts = [torch.tensor([1e8, 1.0, -1e8, 1.0, 1e-3])[k].expand(300_000).clone() for k in range(n)]
    wanted = parts[0].clone()
    for part in parts[1:]:
        wanted += part
    x = parts[rank].clone()
    dist.all_reduce(x)
    assert torch.equal(x, wanted)
    out = torch.empty(300_000 // n)
    dist.reduce_scatter_tensor(out, parts[rank][: out.numel() * n])
    assert torch.equal(out, wanted[: out.numel()])
    x = torch.tensor([rank + 1 << 40, -3, 7]).clone()
    dist.all_reduce(x, op=dist.ReduceOp.BXOR)
    last = 0
    for k in range(n):
        last ^= k + 1 << 40
    assert x[0] == last


def test_sums_are_in_rank_order_and_16_bit_ones_round_once() -> None:
    run_ranks(5, _sums, 5)


@on_shm
def _odd_tensors(rank: int, n: int) -> None:
    x = torch.arange(12.0).view(3, 4).t()
    x = x + 0  # keeps the strides
    assert not x.is_contiguous()
    dist.all_reduce(x)
    assert torch.equal(x, torch.arange(12.0).view(3, 4).t() * n)
    leaf = torch.ones(3, requires_grad=True)
    dist.all_reduce(leaf)
    assert leaf.tolist() == [n] * 3 and leaf._version == 0
    scalar = torch.tensor(rank)
    outs = [torch.tensor(-1) for _ in range(n)]
    dist.all_gather(outs, scalar)
    assert [int(o) for o in outs] == list(range(n))
    for dtype in (torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int16):
        x = torch.zeros(5, dtype=torch.float32).to(dtype)
        dist.broadcast(x, src=0)
    objects: list[Any] = [None] * n
    dist.all_gather_object(objects, {"rank": rank, "big": "x" * 100_000 * rank})
    assert [len(o["big"]) for o in objects] == [100_000 * k for k in range(n)]
    box: list[Any] = [f"from {rank}", None]
    dist.broadcast_object_list(box, src=1)
    assert box[0] == "from 1"
    got: list[Any] = [None]
    dist.scatter_object_list(got, [f"to {k}" for k in range(n)] if rank == 0 else None, src=0)
    assert got == [f"to {rank}"]
    many = [torch.full((k + 1,), float(rank)) for k in range(4)]
    dist.all_reduce_coalesced(many)
    assert all((m == n * (n - 1) / 2).all() for m in many)
    own = torch.arange(float(n)) + rank  # reduce-scatter into a part of its own input
    dist.reduce_scatter_tensor(own[rank : rank + 1], own)
    assert own[rank] == n * rank + n * (n - 1) / 2


def test_strided_leaf_scalar_and_object() -> None:
    run_ranks(3, _odd_tensors, 3)


@on_shm
def _messages(rank: int) -> None:
    """Two ranks that send before they receive; more than any mailbox holds; a buffer that is used again at once."""
    peer, big = 1 - rank, 3_000_000
    x = torch.full((big,), float(rank))
    dist.send(x, dst=peer)
    x.fill_(-1)
    got = torch.empty(big)
    dist.recv(got, src=peer)
    assert (got == peer).all()
    small = torch.zeros(2)
    for i in range(5000):
        small.fill_(i)
        dist.send(small, dst=peer, tag=i % 3)
    for tag in (2, 0, 1):
        for i in range(tag, 5000, 3):
            dist.recv(small, src=peer, tag=tag)
            assert small[0] == i
    dist.barrier()


def test_sends_never_wait_for_receives() -> None:
    run_ranks(2, _messages, timeout=60)


@on_shm
def _different_sizes(rank: int) -> None:
    dist.all_reduce(torch.ones(3 + rank))


@on_shm
def _different_operations(rank: int) -> None:
    x = torch.ones(4)
    dist.all_reduce(x) if rank else dist.broadcast(x, src=1)


@on_shm
def _wrong_message(rank: int) -> None:
    if rank:
        dist.send(torch.ones(3), dst=0)
    else:
        dist.recv(torch.ones(4), src=1)


@on_shm
def _wrong_splits(rank: int) -> None:
    dist.all_to_all_single(torch.ones(3), torch.ones(3), [1, 2], [1, 2])


@on_shm
def _timeout(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True).wait(datetime.timedelta(seconds=0.5))
    else:
        time.sleep(2)


@pytest.mark.parametrize(
    "fn, text",
    [
        (_different_sizes, "called all_reduce"),
        (_different_operations, "called"),
        (_wrong_message, "12 bytes"),
        (_wrong_splits, "which expects"),
        (_timeout, "timed out after 0.5 s, waiting for group ranks 1"),
    ],
)
def test_what_does_not_match_is_an_error(fn: Any, text: str) -> None:
    with pytest.raises(RankFailure, match=text):
        run_ranks(2, fn, timeout=30)


@on_shm
def _one(rank: int) -> None:
    assert shm.uses_shared_memory()
    x = torch.arange(3.0)
    dist.all_reduce(x)
    out = torch.empty(3)
    dist.all_gather_into_tensor(out, x)
    dist.reduce_scatter_tensor(out, x)
    dist.all_to_all_single(out, x)
    assert out.tolist() == [0, 1, 2]
    dist.barrier()


_one.needs_group = True  # type: ignore[attr-defined]


def test_group_of_one() -> None:
    run_ranks(1, _one)


@pytest.mark.parametrize("bad", ["sparse", "float8"])
def test_refusals(bad: str) -> None:
    from hybrid5d.shared_memory.memory import plain
    from hybrid5d.shared_memory.reduce import check_reduction

    with pytest.raises(ValueError, match="shm"):
        if bad == "sparse":
            plain(torch.ones(2, 2).to_sparse())
        else:
            check_reduction(dist.ReduceOp.SUM, torch.float8_e5m2)


def test_stands_alone() -> None:
    """The package imports nothing else of hybrid5d."""
    code = (
        "import sys, hybrid5d.shared_memory; "
        "print([m for m in sys.modules if m.startswith('hybrid5d.') and 'shared_memory' not in m])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert found == "[]"
