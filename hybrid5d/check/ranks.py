"""Run a function on N ranks of this machine, copies of a warm image (torch, DeepSpeed, the package imported already).

`run_ranks(8, fn, *args)` returns the ranks' results in rank order; the first failing rank's traceback is raised here.
`fn(rank, *args)` must be importable (module level) and its arguments and result picklable.

The image is a fork server that has imported `preload`. A rank is a copy-on-write fork of it and serves one call:
what a call does to its process (environment, default dtype, DeepSpeed's globals, patched methods) ends with it.
Measured on two idle cores, start, join and end take 0.03 s for one rank, 0.06 s for two and 0.2 s for eight, where
training one small layout takes 1 to 9 s: ranks that live on from call to call would save little and could hide leaks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing as mp
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

_ENV = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
}
PRELOAD = "hybrid5d.check.preload"
_GRACE = 0.5  # seconds that peers of a failed rank get to say their own reason


class RankFailure(RuntimeError):
    """A rank raised, died or ran out of time."""


def join_group(rank: int, world: int, folder: str, backend: str = "shm") -> None:
    """Make the default process group."""
    import torch.distributed as dist

    import hybrid5d.shared_memory  # noqa: F401  (registers shm)

    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)


def _main(
    rank: int, world: int, folder: str, answer: Connection, fn: Callable[..., Any], args: tuple[Any, ...],
    backend: str,
) -> None:  # fmt: skip
    os.setpgid(0, 0)
    os.environ.update(
        _ENV,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
        CUDA_VISIBLE_DEVICES="",  # ranks mean the CPU, also on a machine with GPUs
    )
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    try:
        import torch

        torch.set_num_threads(1)
        if world > 1 or getattr(fn, "needs_group", False):
            join_group(rank, world, folder, backend)
        payload: tuple[str, Any] = ("ok", fn(rank, *args))
    except BaseException:
        payload = ("error", traceback.format_exc())
    try:
        answer.send((time.time(), *payload))
    except Exception:  # the result cannot be pickled
        answer.send((time.time(), "error", traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    answer.poll(None)  # until all have answered: a rank that leaves early breaks peers that still connect to it
    os._exit(0)  # group teardown can wait for dead peers


Answer = tuple[float, str, Any]


def _answers(ranks: list[tuple[Any, Connection]], timeout: float) -> tuple[dict[int, Answer], bool]:
    """What each rank sent (one that died sent nothing), and whether time ran out."""
    result: dict[int, Answer] = {}
    waiting = dict(enumerate(ranks))
    end, failed = time.monotonic() + timeout, False
    while waiting and (left := end - time.monotonic()) > 0:
        # A rank's own child may hold its pipe open: the sentinel says that the rank itself is dead.
        ready = wait([x for proc, pipe in waiting.values() for x in (proc.sentinel, pipe)], left)
        for rank, (proc, pipe) in list(waiting.items()):
            if pipe in ready or proc.sentinel in ready:
                del waiting[rank]
                with contextlib.suppress(EOFError):
                    if pipe.poll():
                        result[rank] = pipe.recv()
                if not failed and (rank not in result or result[rank][1] == "error"):
                    failed, end = True, min(end, time.monotonic() + _GRACE)
    return result, bool(waiting) and not failed


def _results(ranks: list[tuple[Any, Connection]], timeout: float) -> list[Any]:
    result, timed_out = _answers(ranks, timeout)
    errors = sorted((when, rank, text) for rank, (when, kind, text) in result.items() if kind == "error")
    if errors:
        _, rank, text = errors[0]
        raise RankFailure(f"rank {rank} of {len(ranks)} failed:\n{text}")
    missing = {rank: proc for rank, (proc, _) in enumerate(ranks) if rank not in result}
    if timed_out:
        for proc in missing.values():
            os.kill(proc.pid, signal.SIGUSR1)  # its stacks, on standard error
        time.sleep(_GRACE)
        raise RankFailure(f"no result within {timeout} s from ranks {list(missing)}")
    if missing:
        codes = {rank: proc.exitcode for rank, proc in missing.items() if not proc.is_alive()}
        raise RankFailure(f"ranks {list(codes)} died without a message, exit codes {list(codes.values())}")
    return [result[rank][2] for rank in range(len(ranks))]


def run_ranks(
    world: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0, backend: str = "shm",
    preload: str = PRELOAD,
) -> list[Any]:  # fmt: skip
    """Results of `fn(rank, *args)` on `world` ranks joined in one process group of `backend`.

    `preload`: module that the image imports; the first call of a process decides.

    Raises:
        RankFailure: a rank raised (the earliest one's traceback), died, or gave no result within `timeout` seconds.
    """
    os.environ.update(_ENV)  # the fork server reads it when it starts
    ctx = mp.get_context("forkserver")
    ctx.set_forkserver_preload([preload])
    folder = tempfile.mkdtemp(prefix="h5d-")
    ranks: list[tuple[Any, Connection]] = []
    try:
        for rank in range(world):
            ours, theirs = ctx.Pipe()
            proc = ctx.Process(target=_main, args=(rank, world, folder, theirs, fn, args, backend), daemon=True)
            proc.start()
            theirs.close()
            ranks.append((proc, ours))
        return _results(ranks, timeout)
    finally:
        for proc, pipe in ranks:
            pipe.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(proc.pid, signal.SIGKILL)  # with the data workers that it may have started
            proc.kill()
        for proc, _ in ranks:
            proc.join(5)
        shutil.rmtree(folder, ignore_errors=True)
