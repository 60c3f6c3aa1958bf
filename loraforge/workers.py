"""Independent pieces of work in processes of their own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

import torch

from loraforge.threads import available_cpus

K = TypeVar("K")
R = TypeVar("R")


def each(function: Callable[..., R], asked: Mapping[K, tuple[Any, ...]], jobs: int) -> Iterator[tuple[K, R]]:
    """``function(*asked[key])`` of every key, as they end; begun in the order of ``asked``.

    With one job here, one after the other; with more in as many processes, which share the cores, each with what its
    first piece of work left open there. What a piece raises ends all.
    """
    jobs = min(jobs, len(asked))
    if jobs <= 1:
        for key, arguments in asked.items():
            yield key, function(*arguments)
        return
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    threads = max(1, available_cpus() // jobs)
    with ProcessPoolExecutor(jobs, context, torch.set_num_threads, (threads,)) as pool:
        running = {pool.submit(function, *arguments): key for key, arguments in asked.items()}
        try:
            for future in as_completed(running):
                yield running[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
