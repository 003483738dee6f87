"""Encoding batches in order, in the caller or in worker processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from itertools import islice
from multiprocessing.context import BaseContext
from types import ModuleType
from typing import Any, TypeVar

from hybrid5d.errors import DataError

Payload = TypeVar("Payload")
Label = TypeVar("Label")
Result = TypeVar("Result")

_AHEAD = 3  # batches in flight per worker: bounds memory
_SLOW_IMPORTS = ("hybrid5d.data.chat", "tokenizers", "transformers.utils.chat_template_utils")
_MAIN = threading.Lock()  # one thread at a time takes the main module away and puts it back
_encode: Callable[[Any], Any]  # of a worker process, set once when it starts


def _start(encode: Callable[[Any], Any]) -> None:
    global _encode
    for number in (signal.SIGTERM, signal.SIGUSR1):  # sent to a whole job; the caller answers, and ends this process
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_end_with_caller, name="hybrid5d-caller", daemon=True).start()
    _encode = encode


def _end_with_caller() -> None:
    """A worker that waits for work does not see that its caller was killed: the workers keep the queue's ends open."""
    caller = multiprocessing.parent_process()
    if caller is not None:
        caller.join()
        os._exit(1)


def _run(payload: Any) -> Any:
    return _encode(payload)


def _context() -> BaseContext:
    """How workers start: from a server without threads that has imported what the caller has, where there is one.

    Never by a fork of the caller: that would inherit the locks of the tokenizer's, torch's and gloo's threads.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *(m for m in _SLOW_IMPORTS if m in sys.modules)])
    return context


@contextmanager
def _no_main_module() -> Iterator[None]:
    """Inside, a new process does not import the caller's main module: a script without a guard would run again."""
    with _MAIN:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _pool(encode: Callable[[Any], Any], num_workers: int) -> tuple[Executor, Callable[[Any], Any]]:
    """Where batches are encoded, and what is called there."""
    if num_workers <= 0:  # the tokenizer works outside the interpreter's lock: one batch in it, one before or after it
        return ThreadPoolExecutor(2), encode
    return ProcessPoolExecutor(num_workers, mp_context=_context(), initializer=_start, initargs=(encode,)), _run


@contextmanager
def _named_death(num_workers: int) -> Iterator[None]:
    """A process that was killed is reported by the next result, or by the next batch that is handed over."""
    try:
        yield
    except BrokenProcessPool as e:
        raise DataError(
            f"a tokenising process of {num_workers} died (killed for memory?)."
            " Fix: a smaller data.num_workers; 0 tokenises in the caller"
        ) from e


def encode_batches(
    encode: Callable[[Payload], Result], batches: Iterable[tuple[Payload, Label]], num_workers: int
) -> Iterator[tuple[Result, Label]]:
    """(encode(payload), label) for every (payload, label), in order.

    With `num_workers` > 0 that many processes encode; `encode` must then be picklable, and importable by name from
    anywhere but the main module. With 0 two threads of the caller do, and the tokenizer's own. Raises DataError where a
    process is killed.
    """
    pool, call = _pool(encode, num_workers)
    with _named_death(num_workers), pool:
        iterator = iter(batches)
        waiting: deque[tuple[Future[Result], Label]] = deque()
        while True:
            for payload, label in islice(iterator, max(0, _AHEAD * max(1, num_workers) - len(waiting))):
                with _no_main_module() if num_workers > 0 else nullcontext():
                    waiting.append((pool.submit(call, payload), label))
            if not waiting:
                return
            future, label = waiting.popleft()
            yield future.result(), label
