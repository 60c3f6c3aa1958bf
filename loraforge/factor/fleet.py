"""The factor stage of a whole fleet: what the cache lacks is built, on GPUs together, on a CPU adapter by adapter.

Bytes, for factors of n parameters: hashing reads the weight files once, and a GPU's loader a second time, since only
their hash tells what is missing; the cache takes 4 n bytes, hashed as they are written. At qwen50's size (11.9 GB of
BF16) that is 24 GB over the bus and onto the disk, next to which everything else is small: a fleet that is compressed
once, under one budget, is faster done without (:mod:`loraforge.export.deferred`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from loraforge.factor import gpu
from loraforge.factor.cache import BuildTiming, CachedAdapter, cache_path, find, store, store_timing
from loraforge.factor.engine import Method, factorise_adapter, paths_of
from loraforge.factor.pool import Pool, worker_pool
from loraforge.factor.stages import Stages
from loraforge.files import sweep_files
from loraforge.fleet.peft_io import Adapter
from loraforge.progress import Ticker, progress, say
from loraforge.threads import in_threads


def factorise_fleet(
    adapters: Sequence[Adapter],
    cache: Path,
    *,
    method: Method = "auto",
    workers: int | None = None,
    devices: Sequence[str] = (),
    stages: Stages | None = None,
) -> list[CachedAdapter]:
    """Build the entries that are missing or damaged, and open all of them, in the order of ``adapters``.

    On a GPU where there is one (see :func:`loraforge.factor.gpu.available`): as many adapters together as its memory
    holds, and what it leaves on the CPU. With several ``devices`` (torch's names) the missing adapters are divided
    between them, one process each. Every finished adapter stays: an interrupted run resumes.

    ``workers``: threads of the CPU, by default the available ones. ``stages`` gets the wall-clock seconds of this
    call: ``hash`` (of the weights), ``load``, and ``factor``, which is all else. Raises InputError for unusable
    factors, LoraForgeError where acceptance fails, OutputError where writing does.
    """
    paths_of(method)
    if torch.cuda.is_available() and not gpu.available():
        say("there is a GPU, but no compiler for its kernels: working on the CPU (see loraforge doctor)")
    stages = Stages() if stages is None else stages
    started = time.perf_counter()
    inner = Stages()
    with inner("hash"):
        hash_weights(adapters)
    paths = [cache_path(adapter, cache, method) for adapter in adapters]
    found = list(in_threads(lambda pair: find(*pair), list(zip(adapters, paths, strict=True))))
    # adapters of equal weights share an entry
    missing = {
        path: adapter for path, adapter, entry in zip(paths, adapters, found, strict=True) if not entry
    }
    if missing:
        sweep_files(paths[0].parent)  # a half-written entry of a killed run is as large as a whole one
    entries = _build(missing, method, workers, devices, inner) if missing else []
    built = {entry.path: entry for entry in entries}
    stages.merge(inner)
    stages.add("factor", time.perf_counter() - started - sum(inner.seconds.values()))
    return [
        entry or CachedAdapter(adapter.name, path, built[path].modules)
        for adapter, path, entry in zip(adapters, paths, found, strict=True)
    ]


def hash_weights(adapters: Sequence[Adapter]) -> None:
    """Read and hash, in threads, the weights whose SHA-256 nobody has told yet."""
    unknown = [adapter for adapter in adapters if not adapter.hashed]
    hashes = in_threads(lambda adapter: adapter.weights.sha256(), unknown)
    for adapter, sha256 in zip(unknown, hashes, strict=True):
        adapter.state_sha256(sha256)


def _build(
    missing: Mapping[Path, Adapter],
    method: Method,
    workers: int | None,
    devices: Sequence[str],
    stages: Stages,
) -> list[CachedAdapter]:
    # what GPUs need is not imported where there is none
    with progress("factor", len(missing)) as ticker:
        if method != "reference" and len(devices) > 1 and len(missing) > 1:
            from loraforge.factor.gpu.processes import build_on_devices

            return build_on_devices(missing, method, workers, devices, ticker)
        backend = None if method == "reference" else gpu.kernels()
        with worker_pool(workers) as pool:
            if method != "reference" and backend is not None:
                from loraforge.factor.gpu.entries import build_on_gpu

                return build_on_gpu(missing, backend, method, pool, stages, ticker)
            return [_build_on_cpu(adapter, path, method, pool, ticker) for path, adapter in missing.items()]


def _build_on_cpu(adapter: Adapter, path: Path, method: Method, pool: Pool, ticker: Ticker) -> CachedAdapter:
    started, stages = time.perf_counter(), Stages()
    modules = factorise_adapter(adapter, method=method, pool=pool, stages=stages)
    shares = {name: seconds / pool.workers for name, seconds in stages.seconds.items()}
    with (write := Stages())("write"):
        entry = store(adapter, path, modules)
    store_timing(entry, BuildTiming(time.perf_counter() - started, pool.workers, shares | write.seconds))
    ticker.advance(adapter.name)
    return entry
