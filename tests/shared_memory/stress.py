"""Random collectives and messages on random groups, each result compared bitwise with a model of what it must be.

    python -m tests.shared_memory.stress [--ranks 8] [--seconds 600] [--seed N]     (taskset -c 0 for one core)

All ranks draw the same operations from the seed; in which order a rank starts operations of different groups, in which
it waits for them, and how long it sleeps, is drawn by the rank.
"""

from __future__ import annotations

import argparse
import random
import secrets
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness import run_ranks

SIZES = (0, 1, 3, 17, 64, 1000, 8191, 8192, 8193, 20_000, 70_001, 300_000)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
SUMS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)
OPS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "gather",
    "scatter",
    "reduce",
    "barrier",
)
Check = Callable[[], Any]


def values(seed: str, rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """What `rank` puts into an operation."""
    g = torch.Generator().manual_seed(random.Random(f"{seed}/{rank}").getrandbits(60))
    if dtype.is_floating_point:
        return torch.randn(size, generator=g).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, (size,), generator=g).to(dtype)


def total(parts: list[Tensor], op: str) -> Tensor:
    """The reduction in rank order, one rank after the other; 16-bit floats in fp32, rounded once."""
    dtype = parts[0].dtype
    wide = [p.float() if dtype in (torch.bfloat16, torch.float16) else p for p in parts]
    result = wide[0].clone()
    for part in wide[1:]:
        result = torch.maximum(result, part) if op == "MAX" else result * part if op == "PRODUCT" else result + part
    if op == "AVG":
        result = result / len(parts)
    return result.to(dtype)


def strided(x: Tensor, rng: random.Random) -> Tensor:
    """The same elements, now and then every second one of a larger tensor."""
    if rng.random() < 0.8:
        return x.clone()
    base = torch.zeros(2 * x.numel(), dtype=x.dtype)
    base[::2] = x
    return base[::2]


def equal(what: str, got: Tensor, wanted: Tensor) -> None:
    if not torch.equal(got, wanted):
        at = (got != wanted).nonzero()[:3].flatten().tolist()
        raise AssertionError(f"{what}: {(got != wanted).sum()} of {got.numel()} elements differ, the first at {at}")


class Step:
    """One collective as drawn from the seed: `start` gives torch's work and the check of its result."""

    def __init__(self, seed: str, members: list[int], group: Any):
        self.rng, self.seed, self.members, self.group = random.Random(seed), seed, members, group
        self.op = self.rng.choice(OPS)
        self.size = self.rng.choice(SIZES)
        self.dtype = self.rng.choice(SUMS if "reduce" in self.op else DTYPES)
        kinds = ("SUM", "SUM", "MAX", "AVG" if self.dtype.is_floating_point else "SUM", "PRODUCT")
        self.kind = self.rng.choice(kinds)
        self.root = self.rng.randrange(len(members))
        self.what = f"{seed} {self.op} {self.kind} of {self.size} {self.dtype} over {members}, root {self.root}"

    def of(self, k: int, times: int = 1) -> Tensor:
        return values(self.seed, k, self.size * times, self.dtype)

    def start(self, rank: int) -> tuple[Any, Check]:
        n, me = len(self.members), self.members.index(rank)
        mine = random.Random(f"{self.seed}/{rank}")
        everyone = [self.of(k) for k in range(n)]
        reduction = getattr(dist.ReduceOp, self.kind)
        common: dict[str, Any] = {"group": self.group, "async_op": True}
        if self.op == "barrier":
            return dist.barrier(**common), lambda: None
        x = strided(everyone[me], mine)
        if self.op == "all_reduce":
            work = dist.all_reduce(x, op=reduction, **common)
            return work, lambda: equal(self.what, x, total(everyone, self.kind))
        if self.op == "reduce":
            work = dist.reduce(x, group_dst=self.root, op=reduction, **common)
            wanted = total(everyone, self.kind) if me == self.root else everyone[me]
            return work, lambda: equal(self.what, x, wanted)
        if self.op == "broadcast":
            work = dist.broadcast(x, group_src=self.root, **common)
            return work, lambda: equal(self.what, x, everyone[self.root])
        if self.op in ("all_gather", "gather"):
            outs = [strided(torch.zeros_like(everyone[0]), mine) for _ in range(n)]
            if self.op == "all_gather":
                work = dist.all_gather(outs, x, **common)
            else:
                work = dist.gather(x, outs if me == self.root else None, group_dst=self.root, **common)
                outs = outs if me == self.root else []
            return work, lambda: [equal(self.what, o, e) for o, e in zip(outs, everyone)]
        out = strided(torch.zeros_like(everyone[0]), mine)
        if self.op == "scatter":
            parts = [*self.of(self.root, n).split(self.size)] if self.size else [out.clone() for _ in range(n)]
            work = dist.scatter(out, parts if me == self.root else None, group_src=self.root, **common)
            return work, lambda: equal(self.what, out, parts[me])
        if self.op == "reduce_scatter":
            whole = [self.of(k, n) for k in range(n)]
            work = dist.reduce_scatter(out, [*whole[me].view(n, -1)], op=reduction, **common)
            return work, lambda: equal(self.what, out, total([w.view(n, -1)[me] for w in whole], self.kind))
        return self._all_to_all(n, me, common)

    def _all_to_all(self, n: int, me: int, common: dict[str, Any]) -> tuple[Any, Check]:
        """Sizes from a table: row k is what rank k sends."""
        top = max(1, self.size // n)
        table = [[self.rng.randrange(top) if self.rng.random() < 0.8 else 0 for _ in range(n)] for _ in range(n)]
        sent = [values(self.seed, k, sum(table[k]), self.dtype).split(table[k]) for k in range(n)]
        sizes = [table[k][me] for k in range(n)]
        out = torch.zeros(sum(sizes), dtype=self.dtype)
        work = dist.all_to_all_single(out, torch.cat(sent[me]), sizes, table[me], **common)
        return work, lambda: equal(self.what, out, torch.cat([sent[k][me] for k in range(n)]))


def messages(seed: str, rank: int, n: int, group: Any, nap: Callable[[], None]) -> None:
    """Random messages with tags, in any order; a sent tensor is overwritten as soon as its wait ends."""
    rng, mine = random.Random(seed), random.Random(f"{seed}/{rank}")
    plan = []
    for tag in range(rng.randint(1, 12)):
        source, target = rng.sample(range(n), 2)
        plan.append((source, target, tag, rng.choice(SIZES), rng.choice(DTYPES)))
    anyone, tag = rng.randrange(n), 100
    todo: list[Callable[[], tuple[Any, Check]]] = []

    def send(target: int, tag: int, x: Tensor, blocking: bool) -> tuple[Any, Check]:
        if blocking:
            dist.send(x, group_dst=target, group=group, tag=tag)
            x.zero_()
            return None, lambda: None
        return dist.isend(x, group_dst=target, group=group, tag=tag), lambda: x.zero_()

    def receive(source: int, tag: int, wanted: Tensor) -> tuple[Any, Check]:
        got = strided(torch.zeros_like(wanted), mine)
        work = dist.irecv(got, group_src=source, group=group, tag=tag)
        return work, lambda: equal(f"{seed} message {tag} {source} -> {rank}", got, wanted)

    for source, target, t, size, dtype in plan:
        x = values(f"{seed}/{t}", 0, size, dtype)
        if rank == source:
            todo.append(lambda g=target, t=t, x=x: send(g, t, strided(x, mine), mine.random() < 0.3))
        if rank == target:
            todo.append(lambda s=source, t=t, x=x: receive(s, t, x))
    mine.shuffle(todo)
    begun = [start() for start in todo]
    if rank != anyone:
        dist.send(torch.tensor([rank * 7]), group_dst=anyone, group=group, tag=tag)
    nap()
    mine.shuffle(begun)
    for work, check in begun:
        if work is not None:
            work.wait()
        check()
    if rank == anyone:
        got = torch.zeros(1, dtype=torch.int64)
        sources = set()
        for _ in range(n - 1):
            source = dist.recv(got, group=group, tag=tag)
            assert got.item() == source * 7, f"{seed}: {got.item()} came from {source}"
            sources.add(source)
        assert len(sources) == n - 1, f"{seed}: {sources}"


def stress(rank: int, n: int, seed: int, seconds: float) -> int:
    """Run for `seconds`; the number of steps made."""
    draw = random.Random(seed)
    subsets = [list(range(n))] + [sorted(draw.sample(range(n), draw.randint(2, n))) for _ in range(5)]
    groups = [(members, dist.new_group(members)) for members in subsets]
    mine = random.Random(f"{seed}/{rank}")

    def nap() -> None:
        if mine.random() < 0.1:
            time.sleep(mine.choice((0, 1e-4, 1e-3, 1e-2)))

    end, step = time.monotonic() + seconds, 0
    while True:
        lists = []
        for i, (members, group) in enumerate(groups):
            steps = [Step(f"{seed}/{step}/{i}/{j}", members, group) for j in range(draw.choice((0, 0, 0, 1, 1, 2, 4)))]
            if rank in members and steps:
                lists.append(steps)
        begun = []
        while lists:
            steps = mine.choice(lists)
            begun.append(steps.pop(0).start(rank))
            nap()
            lists = [x for x in lists if x]
        mine.shuffle(begun)
        for work, check in begun:
            work.wait()
            nap()
            check()
        if step % 3 == 0:
            messages(f"{seed}/{step}", rank, n, groups[0][1], nap)
        step += 1
        if step % 20 == 0:
            on = torch.tensor(int(time.monotonic() < end))
            dist.broadcast(on, src=0)
            if not on:
                return step


stress.backend = "shm"  # type: ignore[attr-defined]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=secrets.randbits(30))
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    steps = run_ranks(args.ranks, stress, args.ranks, args.seed, args.seconds, timeout=args.seconds + 120)
    print(f"{steps[0]} steps on {args.ranks} ranks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
