"""Encoding batches in order, in the caller or in worker processes."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, TypeVar

Payload = TypeVar("Payload")
Label = TypeVar("Label")
Result = TypeVar("Result")

_AHEAD = 2  # batches in flight per worker: bounds memory
_encode: Callable[[Any], Any]  # of a worker process, set once when it starts


def _start(make_encoder: Callable[[], Callable[[Any], Any]]) -> None:
    global _encode
    # the processes are the parallelism; and after a fork the tokenizer's threads would be waited for without end
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encode = make_encoder()


def _given(encode: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Makes the encoder of a forked process: the one it was born with."""
    return encode


def _start_method() -> str:
    """`fork`, which imports and loads nothing again, where this process has one thread: no lock can then be held."""
    try:
        alone = threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1
    except OSError:  # not Linux
        alone = False
    return "fork" if alone else "spawn"


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
    method = _start_method()
    make = partial(_given, encode) if method == "fork" else make_encoder
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start, initargs=(make,)) as pool:
        iterator = iter(batches)
        waiting: deque[tuple[Future[Result], Label]] = deque()
        while True:
            for payload, label in islice(iterator, max(0, _AHEAD * num_workers - len(waiting))):
                waiting.append((pool.submit(_run, payload), label))
            if not waiting:
                return
            future, label = waiting.popleft()
            yield future.result(), label
