"""A cached fleet exported on a GPU: spectra from its cache, the kept directions built again from the originals.

The certificates need the originals on the device anyway, at 2 bytes a parameter in BF16, and from there a prefix costs
less than its cached columns: those lie scattered in 4 bytes a parameter, of which a small budget keeps a tenth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from loraforge.export.built import Measured, build_kept, whole_adapters
from loraforge.export.directions import CachedFleet, Directions, Kept, Ranks
from loraforge.factor.cache import CachedAdapter
from loraforge.factor.gpu.engine import Method
from loraforge.factor.gpu.fleet import PATHS
from loraforge.factor.gpu.loader import load_fleet
from loraforge.factor.gpu.ops import Backend
from loraforge.factor.gpu.shards import STREAMED_BYTES, over_shards
from loraforge.factor.stages import Stages
from loraforge.fleet.peft_io import Adapter

_Shard = tuple[list[Adapter], dict[tuple[str, str], Kept]]


class RebuiltFleet:
    """A :class:`~loraforge.export.directions.Source` over the cache entries of ``fleet``, in its order, on one GPU.

    Directions agree with the cached ones within rounding, and have their spectra to the acceptance of the cache.
    Adapters with a module that a GPU has not factorised or does not vouch for, or that do not fit, are exported from
    the cache on the CPU. ``stages``: wall-clock seconds ``load`` and ``factor``.
    """

    def __init__(
        self,
        fleet: Sequence[Adapter],
        entries: Sequence[CachedAdapter],
        backend: Backend,
        method: Method,
        stages: Stages,
    ) -> None:
        self._fleet, self.spectra = fleet, entries
        self._backend, self._method, self._stages = backend, method, stages

    def directions(self, ranks: Ranks, dtype: torch.dtype | None) -> Iterator[Directions]:
        measured = {
            adapter.name: _measured(adapter, entry)
            for adapter, entry in zip(self._fleet, self.spectra, strict=True)
            if all(record.path in PATHS.values() for record in entry.modules.values())
        }

        def work(adapters: list[Adapter]) -> _Shard:
            loaded = load_fleet(adapters, self._backend.device, self._stages)
            kept = build_kept(
                loaded, measured, ranks, dtype, self._backend, self._stages, method=self._method
            )
            return adapters, kept

        done: set[str] = set()
        mine = [adapter for adapter in self._fleet if adapter.name in measured]
        for adapters, kept in over_shards(
            mine, self._backend.device, work, lambda adapter: ([adapter], {}), most=STREAMED_BYTES
        ):
            for directions in whole_adapters(adapters, kept, measured, self._backend.device):
                done.add(directions.adapter.name)
                yield directions
            del kept
        rest = [pair for pair in zip(self._fleet, self.spectra, strict=True) if pair[0].name not in done]
        if rest:
            plain = CachedFleet([adapter for adapter, _ in rest], [entry for _, entry in rest])
            yield from plain.directions(ranks, dtype)


def _measured(adapter: Adapter, entry: CachedAdapter) -> Measured:
    names = [module.name for module in adapter.modules]
    return Measured(
        adapter.name,
        entry.path.stem,
        dict(zip(names, adapter.modules, strict=True)),
        {name: entry.spectrum(name) for name in names},
        {name: entry.modules[name].path for name in names},
    )
