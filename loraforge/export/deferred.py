"""A fleet factorised on one GPU for one export: spectra first, then only the directions that are kept, and no cache.

Bytes, for a fleet of w bytes of weights and n parameters: w are read into pinned memory, hashed there, and sent
over the bus; the device reads them once for the spectra and once for the kept directions; those come back in their
final type (2 bytes each in BF16) and are hashed and written. The floor is the w over the bus (at qwen50's size,
11.9 GB at 55 GB/s, 0.21 s); a cache's 4 n bytes, back over the bus and onto a disk, are what is saved.
A fleet larger than the device's memory is read twice, in shards of whole adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from loraforge.allocate.policy import Spectra
from loraforge.allocate.problem import Floats
from loraforge.export.built import Measured, build_kept, timed, whole_adapters
from loraforge.export.directions import CachedFleet, Directions, Kept, Ranks
from loraforge.factor.batch import Batch
from loraforge.factor.cache import cache_key
from loraforge.factor.engine import MAX_SPECTRUM_ERROR, spectrum_errors
from loraforge.factor.fleet import factorise_fleet
from loraforge.factor.gpu.check import chunks, root_spectrum
from loraforge.factor.gpu.engine import FAILED, Group, GroupFactors
from loraforge.factor.gpu.fleet import PATHS, factorise_loaded
from loraforge.factor.gpu.loader import LoadedFleet, load_fleet
from loraforge.factor.gpu.ops import Backend
from loraforge.factor.gpu.shards import over_shards
from loraforge.factor.stages import Stages
from loraforge.fleet.peft_io import Adapter


@dataclass
class _Shard:
    """Adapters that are on the device together; ``loaded`` is None where their memory was needed for others."""

    adapters: list[Adapter]
    loaded: LoadedFleet | None


class DeferredFleet:
    """A :class:`~loraforge.export.directions.Source` over a fleet on one GPU, for one call of :meth:`directions`.

    Spectra are held to the acceptance of the cache, and the directions that are built to the same of their action.
    Adapters with a module that the GPU does not take or vouch for, or whose certificate fails, or that do not fit, go
    through :func:`~loraforge.factor.fleet.factorise_fleet` into ``scratch``. ``stages``: wall-clock seconds ``hash``,
    ``load`` and ``factor``. Raises what the factor stage raises.
    """

    def __init__(self, fleet: Sequence[Adapter], backend: Backend, scratch: Path, stages: Stages) -> None:
        self._fleet, self._backend, self._scratch, self._stages = fleet, backend, scratch, stages
        self._measured: dict[str, Measured] = {}
        self._shards: list[_Shard] = []
        for shard, spectra in over_shards(
            fleet, backend.device, self._measure, lambda adapter: (_Shard([adapter], None), {})
        ):
            for earlier in self._shards:
                earlier.loaded = None
            self._shards.append(shard)
            self._measured |= spectra
            del shard
        self._rest = self._on_the_side([adapter for adapter in fleet if adapter.name not in self._measured])
        others = {spectra.adapter: spectra for spectra in self._rest.spectra}
        self.spectra: list[Spectra] = [(self._measured | others)[adapter.name] for adapter in fleet]

    def directions(self, ranks: Ranks, dtype: torch.dtype | None) -> Iterator[Directions]:
        refused: set[str] = set()
        for shard in self._shards:
            mine = [adapter for adapter in shard.adapters if adapter.name in self._measured]
            if mine:
                kept = self._kept(shard, ranks, dtype)
                refused |= {adapter.name for adapter in mine}
                for directions in whole_adapters(mine, kept, self._measured, self._backend.device):
                    refused.remove(directions.adapter.name)
                    yield directions
                del kept
        yield from self._rest.directions(ranks, dtype)
        again = self._on_the_side([adapter for adapter in self._fleet if adapter.name in refused])
        yield from again.directions(ranks, dtype)

    def _on_the_side(self, adapters: Sequence[Adapter]) -> CachedFleet:
        if not adapters:
            return CachedFleet([], [])
        with timed(self._stages, self._backend.device):
            return CachedFleet(adapters, factorise_fleet(adapters, self._scratch))

    def _measure(self, adapters: list[Adapter]) -> tuple[_Shard, dict[str, Measured]]:
        """Spectra of the adapters whose every module is accepted, at the price of one direction a module."""
        loaded = load_fleet(adapters, self._backend.device, self._stages)
        found: dict[int, tuple[Floats, str]] = {}
        with timed(self._stages, self._backend.device):
            one = [torch.ones(len(group), dtype=torch.int64) for group in loaded.groups]
            results = factorise_loaded(loaded, self._backend, ks=one)
            for group, members, result in zip(loaded.groups, loaded.members, results, strict=True):
                good = _spectra_hold(group, result, self._backend)
                for index, path, s, accepted in zip(
                    members.tolist(), result.path.tolist(), result.s.cpu().numpy(), good.tolist(), strict=True
                ):
                    if accepted:
                        found[index] = s, PATHS[path]
        spectra: dict[str, Measured] = {}
        start = 0
        for adapter in adapters:
            indices = range(start, start + len(adapter.modules))
            start = indices.stop
            if all(index in found for index in indices):
                names = [module.name for module in adapter.modules]
                spectra[adapter.name] = Measured(
                    adapter.name,
                    cache_key(adapter),
                    dict(zip(names, adapter.modules, strict=True)),
                    {name: found[index][0] for name, index in zip(names, indices, strict=True)},
                    {name: found[index][1] for name, index in zip(names, indices, strict=True)},
                )
        return _Shard(adapters, loaded), spectra

    def _kept(self, shard: _Shard, ranks: Ranks, dtype: torch.dtype | None) -> dict[tuple[str, str], Kept]:
        """What :func:`~loraforge.export.built.build_kept` gives, which uses up the shard; nothing where that does not
        fit the device."""
        try:
            loaded = shard.loaded or load_fleet(shard.adapters, self._backend.device, self._stages)
            shard.loaded = None
            return build_kept(loaded, self._measured, ranks, dtype, self._backend, self._stages)
        except torch.OutOfMemoryError:
            return {}


def _spectra_hold(group: Group, result: GroupFactors, backend: Backend) -> Tensor:
    """Whether the spectra [m] (bool, CPU) of a group are accepted."""
    errors = []
    for rows in chunks(group):
        batch = Batch.of(group.a[rows], group.b[rows], group.scale[rows])
        errors.append(spectrum_errors(root_spectrum(batch, backend), result.s[rows]))
    return (torch.cat(errors).cpu() < MAX_SPECTRUM_ERROR) & (result.path != FAILED)
