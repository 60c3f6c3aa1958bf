"""Independent pieces of work in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, TypeVar

import torch

from loraforge.errors import LoraForgeError
from loraforge.threads import available_cpus

K = TypeVar("K")
R = TypeVar("R")


def each(function: Callable[..., R], asked: Mapping[K, tuple[Any, ...]], jobs: int) -> Iterator[tuple[K, R]]:
    """``function(*asked[key])`` of every key, as they end; begun in the order of ``asked``.

    With one job here, one after the other; with more in as many processes, which share the cores, each with what its
    first piece of work left open there. Where a piece raises, no other is begun, and those that run are waited for; an
    interrupt ends these, too. Raises LoraForgeError where a process dies.
    """
    jobs = min(jobs, len(asked))
    if jobs <= 1:
        for key, arguments in asked.items():
            yield key, function(*arguments)
        return
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    threads = max(1, available_cpus() // jobs)
    others = set(multiprocessing.active_children())
    waiting = iter(asked.items())
    with ProcessPoolExecutor(jobs, context, _begin, (threads,)) as pool:
        try:
            # no more than there are processes: what a pool has been given ahead cannot be taken back
            running: dict[Future[R], K] = {
                pool.submit(function, *arguments): key for key, arguments in islice(waiting, jobs)
            }
            while running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    key, result = running.pop(future), future.result()
                    for following, arguments in islice(waiting, 1):
                        running[pool.submit(function, *arguments)] = following
                    yield key, result
        except BrokenProcessPool as error:
            raise LoraForgeError(
                "a worker process died",
                remedy="look for its message above; if it lacked memory, use fewer --jobs",
            ) from error
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise


def _begin(threads: int) -> None:
    """What a worker does first."""
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal it reaches the parent, too
    # so that nothing half-written remains
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Leave where the parent was killed: a worker would wait for its next piece of work for ever, model and all."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)
