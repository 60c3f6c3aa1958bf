"""Cache entries from one GPU: adapters together onto it and through it, each one's file written as they come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loraforge.config import Keep
from loraforge.factor.cache import BuildTiming, CachedAdapter, store, store_timing
from loraforge.factor.engine import ModuleFactors, factorise_adapter
from loraforge.factor.gpu.drain import Drain
from loraforge.factor.gpu.engine import Method
from loraforge.factor.gpu.fleet import factorise_together
from loraforge.factor.gpu.ops import Backend
from loraforge.factor.gpu.shards import STREAMED_BYTES, fit_together, over_shards
from loraforge.factor.pool import Pool
from loraforge.factor.stages import Stages
from loraforge.fleet.peft_io import Adapter
from loraforge.progress import Ticker
from loraforge.threads import Background, io_threads


@dataclass(frozen=True)
class _Shard:
    """Adapters and what the device has made of each, with the time that took."""

    adapters: list[Adapter]
    factors: list[dict[str, ModuleFactors]]
    seconds: float
    stages: dict[str, float]


def build_on_gpu(
    missing: Mapping[Path, Adapter],
    backend: Backend,
    method: Method,
    pool: Pool,
    stages: Stages,
    ticker: Ticker,
    keep: Keep = "factors",
) -> list[CachedAdapter]:
    """Build the entries of ``missing`` at the paths that are its keys, in its order.

    While the files of one shard are copied back, hashed and written in threads, the next are loaded. Modules that the
    GPU leaves go to the CPU's paths, in ``pool``. ``stages`` gets ``hash`` and ``load``. ``keep``: see
    :func:`loraforge.factor.cache.store`.
    """
    paths = {adapter.name: path for path, adapter in missing.items()}
    lock, writers_count = threading.Lock(), io_threads()

    def work(adapters: list[Adapter]) -> _Shard:
        started, inner = time.perf_counter(), Stages()
        factors = factorise_together(adapters, backend, method, inner)
        for name in ("hash", "load"):  # which this thread waits for; the rest overlaps
            stages.add(name, inner.seconds[name])
        return _Shard(adapters, factors, time.perf_counter() - started, inner.seconds)

    def finish(
        adapter: Adapter, done: dict[str, ModuleFactors], drain: Drain, shard: _Shard, share: float
    ) -> CachedAdapter:
        with (mine := Stages())("write"):
            rest = Stages()
            modules = factorise_adapter(adapter, method=method, pool=pool, stages=rest, done=done)
            entry = store(adapter, paths[adapter.name], modules, drain, keep=keep)
        write = mine.seconds["write"] / writers_count
        parts = {name: seconds * share for name, seconds in shard.stages.items()} | {"write": write}
        store_timing(entry, BuildTiming(shard.seconds * share + write, writers_count, parts))
        with lock:
            ticker.advance(adapter.name)
        return entry

    adapters = list(missing.values())
    together = fit_together(adapters, backend.device)
    drain = Drain(backend.device)
    with Background[CachedAdapter](writers_count) as writers:
        for shard in over_shards(
            adapters,
            backend.device,
            work,
            lambda adapter: _Shard([adapter], [{}], 0.0, {}),
            most=STREAMED_BYTES,
        ):
            if not together:
                writers.results()  # of the shard before: no more than two are on the device
            drain = Drain(backend.device, sharing=drain)
            whole = sum(adapter.n_parameters for adapter in shard.adapters)
            for adapter, done in zip(shard.adapters, shard.factors, strict=True):
                writers.submit(finish, adapter, done, drain, shard, adapter.n_parameters / whole)
            del shard, done
        return writers.results()
