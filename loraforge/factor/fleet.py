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

from loraforge.config import Keep
from loraforge.factor import gpu
from loraforge.factor.cache import (
    BuildTiming,
    CachedAdapter,
    cache_path,
    find,
    find_spectra,
    spectra_path,
    store,
    store_spectra,
    store_timing,
)
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
    keep: Keep = "factors",
) -> list[CachedAdapter]:
    """Build the entries that are missing or damaged, and open all of them, in the order of ``adapters``.

    On a GPU where there is one (see :func:`loraforge.factor.gpu.available`): as many adapters together as its memory
    holds, and what it leaves on the CPU. With several ``devices`` (torch's names) the missing adapters are divided
    between them, one process each. Every finished adapter stays: an interrupted run resumes.

    ``workers``: threads of the CPU, by default the available ones. ``stages`` gets the wall-clock seconds of this
    call: ``hash`` (of the weights), ``load``, and ``factor``, which is all else. ``keep``: with ``spectra``, factors
    are built and checked but not kept, and entries without them will do. Raises InputError for unusable
    factors, LoraForgeError where acceptance fails, OutputError where writing does.
    """
    check_method(method)
    stages = Stages() if stages is None else stages
    started = time.perf_counter()
    inner = Stages()
    missing, entries = divide(adapters, cache, method, inner, keep)
    if missing:
        with progress("factor", len(missing)) as ticker:
            built = build(missing, method, inner, ticker, workers=workers, devices=devices, keep=keep)
    else:
        built = []
    stages.merge(inner)
    stages.add("factor", time.perf_counter() - started - sum(inner.seconds.values()))
    return complete(adapters, entries, built)


def check_method(method: Method) -> None:
    """Raise UsageError for a method that does not exist; say so where a GPU must be left idle."""
    paths_of(method)
    if torch.cuda.is_available() and not gpu.available():
        say("there is a GPU, but no compiler for its kernels: working on the CPU (see loraforge doctor)")


Entries = list[tuple[Path, CachedAdapter | None]]


def divide(
    adapters: Sequence[Adapter], cache: Path, method: Method, stages: Stages, need: Keep = "factors"
) -> tuple[dict[Path, Adapter], Entries]:
    """Adapters whose entries are missing, by the paths of those (adapters of equal weights share one), and for each of
    ``adapters`` where its entry is, and the entry itself unless it is missing. An entry must have what ``need`` says.
    ``stages`` gets ``hash``."""
    with stages("hash"):
        hash_weights(adapters)
    paths = [cache_path(adapter, cache, method) for adapter in adapters]

    def look(pair: tuple[Adapter, Path]) -> CachedAdapter | None:
        adapter, path = pair
        if need == "spectra" and (entry := find_spectra(adapter.name, path)) is not None:
            return entry
        if (entry := find(adapter, path)) is not None and need == "spectra":
            store_spectra(entry)  # which a run that was stopped did not come to, or are damaged
        return entry

    entries = list(zip(paths, in_threads(look, list(zip(adapters, paths, strict=True))), strict=True))
    missing = {
        path: adapter for adapter, (path, entry) in zip(adapters, entries, strict=True) if entry is None
    }
    return missing, entries


def complete(
    adapters: Sequence[Adapter], entries: Entries, built: Sequence[CachedAdapter]
) -> list[CachedAdapter]:
    """All entries of ``adapters``: those there were, and those that were ``built`` for the others."""
    made = {entry.path: entry for entry in built}
    return [
        entry or CachedAdapter(adapter.name, path, made[path].modules)
        for adapter, (path, entry) in zip(adapters, entries, strict=True)
    ]


def hash_weights(adapters: Sequence[Adapter]) -> None:
    """Read and hash, in threads, the weights whose SHA-256 nobody has told yet."""
    unknown = [adapter for adapter in adapters if not adapter.hashed]
    hashes = in_threads(lambda adapter: adapter.weights.sha256(), unknown)
    for adapter, sha256 in zip(unknown, hashes, strict=True):
        adapter.state_sha256(sha256)


def build(
    missing: Mapping[Path, Adapter],
    method: Method,
    stages: Stages,
    ticker: Ticker,
    *,
    workers: int | None = None,
    devices: Sequence[str] = (),
    keep: Keep = "factors",
) -> list[CachedAdapter]:
    """Build the entries of ``missing`` at the paths that are its keys; see :func:`factorise_fleet`."""
    for folder in {place.parent for path in missing for place in (path, spectra_path(path))}:
        sweep_files(folder)  # a half-written entry of a killed run is as large as a whole one
    # what GPUs need is not imported where there is none
    if method != "reference" and len(devices) > 1 and len(missing) > 1:
        from loraforge.factor.gpu.processes import build_on_devices

        return build_on_devices(missing, method, workers, devices, ticker, keep)
    backend = None if method == "reference" else gpu.kernels()
    with worker_pool(workers) as pool:
        if method != "reference" and backend is not None:
            from loraforge.factor.gpu.entries import build_on_gpu

            return build_on_gpu(missing, backend, method, pool, stages, ticker, keep)
        return [_build_on_cpu(adapter, path, method, pool, ticker, keep) for path, adapter in missing.items()]


def _build_on_cpu(
    adapter: Adapter, path: Path, method: Method, pool: Pool, ticker: Ticker, keep: Keep
) -> CachedAdapter:
    started, stages = time.perf_counter(), Stages()
    modules = factorise_adapter(adapter, method=method, pool=pool, stages=stages)
    shares = {name: seconds / pool.workers for name, seconds in stages.seconds.items()}
    with (write := Stages())("write"):
        entry = store(adapter, path, modules, keep=keep)
    store_timing(entry, BuildTiming(time.perf_counter() - started, pool.workers, shares | write.seconds))
    ticker.advance(adapter.name)
    return entry
