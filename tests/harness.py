"""Run a function on N gloo ranks, forked from a warm parent that has imported torch and deepspeed already.

`run_ranks(8, fn, *args)` returns the ranks' results in rank order; the first failing rank's traceback is raised here.
`fn(rank, *args)` must be importable (module level) and its arguments and result picklable.
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

_ENV = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
}
_PRELOAD = ["tests.preload"]


class RankFailure(AssertionError):
    """A rank raised, died or ran out of time."""


def _context() -> Any:
    os.environ.update(_ENV)  # the fork server reads it when it starts
    ctx = mp.get_context("forkserver")
    ctx.set_forkserver_preload(_PRELOAD)
    return ctx


def _main(rank: int, world: int, folder: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.setpgid(0, 0)
    os.environ.update(
        _ENV,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    out = os.path.join(folder, f"{rank}.pkl")
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if world > 1 or getattr(fn, "needs_group", False):
            dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
        result = fn(rank, *args)
        payload: tuple[str, Any] = ("ok", result)
    except BaseException:
        payload = ("error", traceback.format_exc())
    with open(out + ".tmp", "wb") as f:
        pickle.dump((time.time(), *payload), f)
    os.replace(out + ".tmp", out)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if payload[0] == "ok" else 1)  # group teardown can wait for dead peers


def _read(folder: str, rank: int) -> tuple[float, str, Any] | None:
    try:
        with open(os.path.join(folder, f"{rank}.pkl"), "rb") as f:
            return pickle.load(f)
    except FileNotFoundError:
        return None


def run_ranks(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Results of `fn(rank, *args)` on `world` ranks joined by gloo. Raises RankFailure within `timeout` seconds."""
    folder = tempfile.mkdtemp(prefix="h5d-")
    ctx = _context()
    procs = [ctx.Process(target=_main, args=(r, world, folder, fn, args), daemon=True) for r in range(world)]
    try:
        for p in procs:
            p.start()
        deadline = time.time() + timeout
        failed = False
        while time.time() < deadline and any(p.is_alive() for p in procs):
            if any(p.exitcode not in (None, 0) for p in procs):
                failed = True
                time.sleep(0.5)  # let the peers write their own reason; the earliest is the cause
                break
            time.sleep(0.01)
        timed_out = not failed and any(p.is_alive() for p in procs)
        if timed_out:
            for p in procs:
                if p.is_alive() and p.pid:
                    os.kill(p.pid, signal.SIGUSR1)
            time.sleep(0.5)
        for p in procs:
            if p.is_alive():
                p.kill()
            p.join(5)
        results = [_read(folder, r) for r in range(world)]
        errors = sorted((r[0], i, r[2]) for i, r in enumerate(results) if r and r[1] == "error")
        if errors:
            _, rank, text = errors[0]
            raise RankFailure(f"rank {rank} of {world} failed:\n{text}")
        if timed_out:
            raise RankFailure(f"no result within {timeout} s from ranks {[i for i, r in enumerate(results) if not r]}")
        missing = [i for i, r in enumerate(results) if not r]
        if missing:
            raise RankFailure(
                f"ranks {missing} died without a message, exit codes {[procs[i].exitcode for i in missing]}"
            )
        return [r[2] for r in results if r]
    finally:
        for p in procs:
            if p.is_alive():
                p.kill()
        shutil.rmtree(folder, ignore_errors=True)
