"""Worker threads over batches: LAPACK on small matrices scales across batches, not within one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from loraforge.threads import available_cpus

T = TypeVar("T")
R = TypeVar("R")


class Pool:
    """Runs a function over items on ``workers`` threads; torch drops the interpreter lock inside LAPACK."""

    def __init__(self, executor: ThreadPoolExecutor, workers: int) -> None:
        self._executor, self.workers = executor, workers

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Results in the order of ``items``; the first exception is raised, and items not yet begun are dropped."""
        futures = [self._executor.submit(function, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()


@contextmanager
def worker_pool(workers: int | None = None) -> Iterator[Pool]:
    """Give ``workers`` threads (default: one an available CPU), each with one torch thread of its own.

    Operators of one thread each also make results independent of the number of CPUs.
    """
    count = available_cpus() if workers is None else workers
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as executor:
            yield Pool(executor, count)
    finally:
        torch.set_num_threads(before)
