"""The harness: a failing, dying or hanging rank fails its own test with a reason, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import RankFailure, run_ranks


def _sum(rank: int, *more: int) -> tuple[int, float]:
    x = torch.tensor([float(rank)])
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(x)
    return rank, float(x) + sum(more)


@pytest.mark.parametrize("world", [1, 2, 5])
def test_results_come_in_rank_order(world: int) -> None:
    assert run_ranks(world, _sum, 1, 2) == [(r, world * (world - 1) / 2 + 3) for r in range(world)]


def _leaves_at_once(rank: int) -> int:
    return rank


def test_ranks_that_leave_at_once_do_not_break_peers_that_still_connect() -> None:
    for _ in range(5):
        assert run_ranks(8, _leaves_at_once) == list(range(8))


class Cause(ValueError):
    """Leaves a mark once it is written into a traceback: from then on others come later."""

    def __str__(self) -> str:
        Path(self.args[0]).touch()
        return "the cause"


def _fails(rank: int, mark: Path) -> None:
    if rank == 1:
        raise Cause(mark)
    if rank == 0:
        while not mark.exists():
            time.sleep(0.05)
        time.sleep(0.2)
        raise ValueError("a consequence")
    torch.distributed.all_reduce(torch.zeros(1))


def test_the_first_failing_rank_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"rank 1 of 3 failed:\n(?s:.*)Cause: the cause"):
        run_ranks(3, _fails, tmp_path / "mark", timeout=60)


def _dies(rank: int) -> None:
    if rank == 1:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)  # holds the pipe open
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_a_rank_that_dies_is_named_at_once() -> None:
    """At once: or it would be the run that got no result in time."""
    with pytest.raises(RankFailure, match=r"ranks \[1\] died without a message, exit codes \[-9\]"):
        run_ranks(2, _dies, timeout=60)


def _hangs(rank: int) -> None:
    if rank == 1:
        time.sleep(60)


def test_a_rank_that_hangs_is_named() -> None:
    with pytest.raises(RankFailure, match=r"no result within 3 s from ranks \[1\]"):
        run_ranks(2, _hangs, timeout=3)


def _state(rank: int, *, spoil: bool = False) -> tuple[Any, ...]:
    if spoil:
        os.environ["H5D_LEFT_BEHIND"] = "1"
        torch.set_default_dtype(torch.float64)
        torch.nn.Linear.forward = None  # type: ignore[method-assign,assignment]
    return os.environ.get("H5D_LEFT_BEHIND"), torch.get_default_dtype(), torch.nn.Linear.forward is None


def _spoil(rank: int) -> tuple[Any, ...]:
    return _state(rank, spoil=True)


def test_an_item_leaves_nothing_behind() -> None:
    assert run_ranks(2, _spoil) == [("1", torch.float64, True)] * 2
    assert run_ranks(2, _state) == [(None, torch.float32, False)] * 2


def _no_pickle(rank: int) -> Any:
    return lambda: rank


def test_a_result_that_cannot_be_sent_is_an_error() -> None:
    with pytest.raises(RankFailure, match="pickle"):
        run_ranks(1, _no_pickle)
