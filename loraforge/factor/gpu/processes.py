"""Cache entries from several GPUs: the fleet is divided by adapter, one process a device; they meet in the cache."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.multiprocessing as processes

from loraforge.config import Keep
from loraforge.errors import LoraForgeError
from loraforge.factor.cache import CachedAdapter
from loraforge.factor.gpu.engine import Method
from loraforge.factor.gpu.entries import build_on_gpu
from loraforge.factor.gpu.ops import Backend, Emulated, Kernels
from loraforge.factor.gpu.shards import adapter_bytes
from loraforge.factor.pool import worker_pool
from loraforge.factor.stages import Stages
from loraforge.fleet.peft_io import Adapter
from loraforge.progress import Ticker
from loraforge.threads import available_cpus


def balanced(costs: Sequence[float], count: int) -> list[list[int]]:
    """Divide items into ``count`` parts of about equal cost, by index: the costliest left goes to the part that has
    least, an empty one first."""
    load = [0.0] * count
    parts: list[list[int]] = [[] for _ in range(count)]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        # an empty part comes first even where costs are too small to tell
        least = min(range(count), key=lambda part: (load[part], len(parts[part])))
        load[least] += costs[index]
        parts[least].append(index)
    return [sorted(part) for part in parts]


def backend_on(device: str) -> Backend:
    """The kernels on a device of torch's, made current; on ``cpu`` their emulation."""
    chosen = torch.device(device)
    if chosen.type != "cuda":
        torch.set_num_threads(1)
        return Emulated(chosen)
    torch.cuda.set_device(chosen)
    return Kernels(chosen)


def build_on_devices(
    missing: Mapping[Path, Adapter],
    method: Method,
    workers: int | None,
    devices: Sequence[str],
    ticker: Ticker,
    keep: Keep = "factors",
) -> list[CachedAdapter]:
    """Build the entries of ``missing`` at the paths that are its keys, a part of them on each of ``devices``.

    What any process raises is raised here, and the others are stopped; entries that are done stay. Raises
    LoraForgeError where a process dies. ``keep``: see :func:`loraforge.factor.cache.store`.
    """
    items = list(missing.items())
    count = min(len(devices), len(items))
    threads = max(1, (available_cpus() if workers is None else workers) // count)
    context = processes.get_context("spawn")
    running, lines = [], []
    try:
        for device, part in zip(
            devices, balanced([adapter_bytes(adapter) for _, adapter in items], count), strict=False
        ):
            line, far = context.Pipe(duplex=False)
            process = context.Process(
                target=_build_part,
                args=(device, dict(items[index] for index in part), method, threads, far, keep),
                daemon=True,
            )
            process.start()
            far.close()
            running.append(process)
            lines.append(line)
        return _gather(lines, ticker)
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.join()


def _gather(lines: Sequence[Connection], ticker: Ticker) -> list[CachedAdapter]:
    entries: list[CachedAdapter] = []
    waiting = list(lines)
    while waiting:
        for line in wait(waiting):
            assert isinstance(line, Connection)
            try:
                message = line.recv()
            except EOFError as error:
                raise LoraForgeError(
                    "a factor process died", remedy="look for its message above; it may lack memory"
                ) from error
            if isinstance(message, BaseException):
                raise message
            if isinstance(message, str):
                ticker.advance(message)
            else:
                entries += message
                waiting.remove(line)
    return entries


class _Sender:
    """Progress of a part, for the process that shows it."""

    def __init__(self, line: Connection) -> None:
        self._line = line

    def advance(self, note: str = "", step: int = 1) -> None:
        self._line.send(note)


def _build_part(
    device: str,
    missing: dict[Path, Adapter],
    method: Method,
    workers: int,
    line: Connection,
    keep: Keep,
) -> None:
    """What one process does. It leaves an interrupt to its parent, and cleans up when that stops it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        backend = backend_on(device)
        with worker_pool(workers) as pool:
            entries = build_on_gpu(missing, backend, method, pool, Stages(), _Sender(line), keep)
        line.send(entries)
    except LoraForgeError as error:
        line.send(error)
    except Exception as error:  # its class may not survive the way
        line.send(LoraForgeError(f"{type(error).__name__}: {error}", key=device))
