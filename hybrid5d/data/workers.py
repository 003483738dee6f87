"""Encoding batches in order, in the caller or in worker processes."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from typing import Any, TypeVar

Payload = TypeVar("Payload")
Label = TypeVar("Label")
Result = TypeVar("Result")

_AHEAD = 2  # batches in flight per worker: bounds memory
_encode: Callable[[Any], Any]  # of a worker process, set once when it starts


def _start(make_encoder: Callable[[], Callable[[Any], Any]]) -> None:
    global _encode
    _encode = make_encoder()


def _run(payload: Any) -> Any:
    return _encode(payload)


def encode_batches(
    make_encoder: Callable[[], Callable[[Payload], Result]], batches: Iterable[tuple[Payload, Label]], num_workers: int
) -> Iterator[tuple[Result, Label]]:
    """(encoder(payload), label) for every (payload, label), in order.

    With `num_workers` > 0 that many processes encode; `make_encoder` must then be picklable. It is called here first,
    so that what is wrong with the tokenizer is raised in the caller.
    """
    encode = make_encoder()
    if num_workers <= 0:
        for payload, label in batches:
            yield encode(payload), label
        return
    context = multiprocessing.get_context("spawn")  # a forked child would inherit the tokenizer's and torch's threads
    with ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start, initargs=(make_encoder,)) as pool:
        iterator = iter(batches)
        waiting: deque[tuple[Future[Result], Label]] = deque()
        while True:
            for payload, label in islice(iterator, max(0, _AHEAD * num_workers - len(waiting))):
                waiting.append((pool.submit(_run, payload), label))
            if not waiting:
                return
            future, label = waiting.popleft()
            yield future.result(), label
