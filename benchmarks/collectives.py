"""Collectives of one host: gloo beside hybrid5d.shared_memory, sides taking turns in one run.

    python benchmarks/collectives.py [--ranks 2 4 8] [--ops all_reduce ...] [--most 67108864] [--write docs/performance]

Each rank has one thread. A round times every side at one size, one call after the other; medians, means and 99th
percentiles are over the calls of all rounds, on rank 0. Ratios are gloo's time to ours: above 1 ours is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZES = tuple(64 << (2 * i) for i in range(11))  # 64 B to 64 MiB
ROUNDS = 5


def operations(n: int, rank: int, size: int, group: Any) -> dict[str, Callable[[], Any]]:
    """By name: a call over `size` bytes (all_gather, reduce_scatter, all_to_all: of which size / n are each rank's)."""
    count = max(size // 4, n)
    x = torch.ones(count)
    part, whole = torch.ones(-(-count // n)), torch.ones(-(-count // n) * n)
    received = torch.empty_like(whole)
    peer = rank ^ 1

    def pair() -> None:
        if peer < n:
            work = dist.isend(x, peer, group=group), dist.irecv(pong, peer, group=group)
            for w in work:
                assert w is not None
                w.wait()

    pong = torch.empty_like(x)
    return {
        "all_reduce": lambda: dist.all_reduce(x, group=group),
        "broadcast": lambda: dist.broadcast(x, 0, group=group),
        "reduce": lambda: dist.reduce(x, 0, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(received, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(received, whole, group=group),
        "send_recv": pair,
        "barrier": lambda: dist.barrier(group=group),
    }


def work(rank: int, n: int, port: int, arguments: argparse.Namespace, results: Any) -> None:
    import hybrid5d.shared_memory  # noqa: F401  registers the backend

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_SIZE=str(n))
    dist.init_process_group("gloo", rank=rank, world_size=n)
    groups = {"gloo": dist.new_group(backend="gloo"), "shm": dist.new_group(backend="shm")}
    rows = []
    for name in arguments.ops:
        for size in SIZES if name != "barrier" else SIZES[:1]:
            if not arguments.least <= size <= arguments.most and name != "barrier":
                continue
            calls = {side: operations(n, rank, size, group)[name] for side, group in groups.items()}
            row = measure(calls, groups["gloo"], repeats(size, n))
            rows.append({"op": name, "ranks": n, "bytes": size, **row})
            if rank == 0:
                print(line(rows[-1]), flush=True)
    if rank == 0:
        results.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def repeats(size: int, n: int) -> int:
    return max(3, min(40, (64 << 20) // size // n))


def measure(calls: dict[str, Callable[[], Any]], group: Any, count: int) -> dict[str, dict[str, float]]:
    """Microseconds of each side's calls."""
    times: dict[str, list[float]] = {side: [] for side in calls}
    for call in calls.values():
        call()
    for _ in range(ROUNDS):
        for side, call in calls.items():
            dist.barrier(group=group)
            call()
            for _ in range(count):
                start = time.perf_counter()
                call()
                times[side].append((time.perf_counter() - start) * 1e6)
    return {side: summary(values) for side, values in times.items()}


def summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "mean": statistics.fmean(ordered),
        "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
    }


def ratio(row: dict[str, Any], what: str) -> float:
    return float(row["gloo"][what] / row["shm"][what])


def line(row: dict[str, Any]) -> str:
    times = "  ".join(f"{side} {row[side]['median']:10.1f} us" for side in ("gloo", "shm"))
    ratios = "  ".join(f"{what} {ratio(row, what):6.2f}" for what in ("median", "mean", "p99"))
    return f"{row['op']:14} {row['ranks']} ranks {row['bytes']:>9} B  {times}  ratio {ratios}"


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: ratio of medians (means) by operation and size."""
    lines = []
    for n in sorted({r["ranks"] for r in rows}):
        sizes = sorted({r["bytes"] for r in rows if r["ranks"] == n})
        lines += [f"{n} ranks:", "", "| bytes | " + " | ".join(map(text, sizes)) + " |", "|---|" + "--:|" * len(sizes)]
        for op in dict.fromkeys(r["op"] for r in rows):
            found = {r["bytes"]: r for r in rows if r["ranks"] == n and r["op"] == op}
            shown = {s: f"{ratio(r, 'median'):.1f} ({ratio(r, 'mean'):.1f})" for s, r in found.items()}
            cells = [shown.get(s, "") for s in sizes]
            lines.append(f"| {op} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def text(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB" if size >= 1 << 10 else f"{size} B"


def chart(rows: list[dict[str, Any]], path: Path) -> None:
    """Ratio of medians by size, one picture a number of ranks. Needs the extra `benchmarks`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ranks = sorted({r["ranks"] for r in rows})
    figure, axes = plt.subplots(1, len(ranks), figsize=(4 * len(ranks), 3.4), sharey=True, squeeze=False)
    for axis, n in zip(axes[0], ranks):
        for op in (o for o in dict.fromkeys(r["op"] for r in rows) if o != "barrier"):
            found = [r for r in rows if r["ranks"] == n and r["op"] == op]
            axis.plot([r["bytes"] for r in found], [ratio(r, "median") for r in found], marker=".", label=op)
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set(xscale="log", yscale="log", title=f"{n} ranks", xlabel="bytes")
    axes[0][0].set_ylabel("gloo's time / shm's time (medians)")
    axes[0][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    names = ["all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "barrier"]
    parser.add_argument("--ops", nargs="+", default=names, choices=names)
    parser.add_argument("--most", type=int, default=SIZES[-1], help="largest size in bytes")
    parser.add_argument("--least", type=int, default=SIZES[0], help="smallest size in bytes")
    parser.add_argument("--write", type=Path, help="write PATH.json, PATH.md and PATH.png")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows: list[dict[str, Any]] = []
    for i, n in enumerate(arguments.ranks):
        context = mp.get_context("spawn")
        results: Any = context.SimpleQueue()
        running = mp.start_processes(work, (n, 29600 + i, arguments, results), n, join=False, start_method="spawn")
        rows += results.get()
        running.join()
    print(table(rows))
    if arguments.write:
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
        arguments.write.with_suffix(".md").write_text(table(rows))
        chart(rows, arguments.write.with_suffix(".png"))


if __name__ == "__main__":
    sys.exit(main())
