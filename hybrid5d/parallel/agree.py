"""Failures that all ranks share: no rank goes on, or waits for ever, when another one could not."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import torch.distributed as dist

from hybrid5d.errors import CheckpointError, ConfigError, ConfigErrors, HybridError
from hybrid5d.parallel.context import Axis

T = TypeVar("T")
HOST_TIMEOUT = datetime.timedelta(hours=2)  # of reading weights, writing checkpoints on the slowest host


def world_axis() -> Axis:
    """The axis of all ranks; of one where torch.distributed is not in use."""
    return Axis.from_group(None) if dist.is_available() and dist.is_initialized() else Axis.single()


def gather_objects(value: Any, axis: Axis) -> list[Any]:
    """Every rank's `value`, in axis order; picklable objects. Collective over the axis."""
    if axis.size == 1:
        return [value]
    result: list[Any] = [None] * axis.size
    group = axis.group
    if dist.get_backend(group) == "nccl":
        group = _host_group(axis.ranks, dist.group.WORLD)
    dist.all_gather_object(result, value, group=group)
    return result


@lru_cache
def _host_group(ranks: tuple[int, ...], world: Any) -> dist.ProcessGroup:
    """A group of the same members for what happens on hosts, made by them at its first use.

    On NCCL objects would queue behind kernels, and a rank that waits for another's slow disk would be aborted after the
    time that a collective of training may take. `world`: the job that the group belongs to.
    """
    return dist.new_group(list(ranks), timeout=HOST_TIMEOUT, backend="gloo", use_local_synchronization=True)


def together(axis: Axis, work: Callable[[], T]) -> T:
    """Run `work`, which must not communicate over `axis`, on every rank; where it fails on one, all raise.

    Equal messages are shown once; a message of some ranks only names the first of them. Collective over the axis.

    Raises:
        ConfigErrors: every failure was one.
        CheckpointError: otherwise, one line per failure.
    """
    result, failure = None, None
    try:
        result = work()
    except (HybridError, OSError) as exc:
        failure = exc
    except Exception as exc:
        gather_objects(_describe(exc), axis)
        raise
    raise_together(axis, failure)
    return result  # type: ignore[return-value]


def _describe(exc: Exception | None) -> tuple[ConfigError, ...] | str | None:
    if isinstance(exc, ConfigErrors):
        return exc.errors
    if isinstance(exc, OSError):
        return f"{exc.filename}: {exc.strerror}" if exc.filename else str(exc)
    if exc is None or isinstance(exc, HybridError):
        return None if exc is None else str(exc)
    return f"{type(exc).__name__}: {exc}"


def raise_together(axis: Axis, failure: Exception | None) -> None:
    """Raise on every rank when `failure` is set on any. Collective over the axis."""
    everyone = gather_objects(_describe(failure), axis)
    failed = {rank: what for rank, what in zip(axis.ranks, everyone) if what is not None}
    if not failed:
        return
    if all(isinstance(what, tuple) for what in failed.values()):
        raise ConfigErrors({str(e): e for errors in failed.values() for e in errors}.values()) from failure
    lines: dict[str, list[int]] = {}
    for rank, what in failed.items():
        for line in map(str, what) if isinstance(what, tuple) else what.splitlines():
            lines.setdefault(line, []).append(rank)
    shown = [line if len(ranks) == axis.size else f"rank {ranks[0]}: {line}" for line, ranks in lines.items()]
    raise CheckpointError("\n".join(shown)) from failure
