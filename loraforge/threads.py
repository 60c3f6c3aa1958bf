"""Threads for work that leaves the interpreter: reading, hashing, writing. No torch."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, ParamSpec, Self, TypeVar

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


def available_cpus() -> int:
    """CPUs that this process may use; where the system has no affinity (macOS), those that there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def io_threads() -> int:
    """Threads that keep a disk, or memory, busy: one an available CPU, at most 16."""
    return min(16, available_cpus())


def in_threads(function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Results in the order of ``items``; the first exception is raised, and what has not begun is dropped."""
    with ThreadPoolExecutor(io_threads()) as pool:
        running = [pool.submit(function, item) for item in items]
        try:
            for future in running:
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


class Background(Generic[R]):
    """Calls that go on behind their caller in ``workers`` threads.

    ``limit`` bounds the calls that run or wait, and with them what they hold. Where the ``with`` block fails, calls
    that have not begun are dropped.
    """

    def __init__(self, workers: int, *, limit: int | None = None) -> None:
        self._pool, self._limit = ThreadPoolExecutor(workers), limit
        self._running: deque[Future[R]] = deque()
        self._done: list[R] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def submit(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> None:
        """Start a call, once fewer than the limit are under way. Raises what an earlier one has raised."""
        while self._limit is not None and len(self._running) >= self._limit:
            self._done.append(self._running.popleft().result())
        self._running.append(self._pool.submit(function, *args, **kwargs))

    def results(self) -> list[R]:
        """Wait for all calls; what they returned, in the order of their submission."""
        while self._running:
            self._done.append(self._running.popleft().result())
        return self._done
