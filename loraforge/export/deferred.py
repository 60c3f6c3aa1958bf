"""A fleet factorised on one GPU for one export: spectra first, then only the directions that are kept, and no cache.

Bytes, for a fleet of w bytes of weights and n parameters: w are read into pinned memory, hashed there, and sent
over the bus; the device reads them once for the spectra and once for the kept directions; those come back in their
final type (2 bytes each in BF16) and are hashed and written. The floor is the w over the bus (at qwen50's size,
11.9 GB at 55 GB/s, 0.21 s); a cache's 4 n bytes, back over the bus and onto a disk, are what is saved.
A fleet larger than the device's memory is read twice, in shards of whole adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from loraforge.allocate.policy import Spectra
from loraforge.allocate.problem import Floats
from loraforge.export.certificate import leading_right_directions, probes
from loraforge.export.directions import CachedFleet, Directions, Kept, Ranks, accepted_error
from loraforge.factor.batch import Batch
from loraforge.factor.cache import cache_key
from loraforge.factor.engine import MAX_ACTION_ERROR, MAX_SPECTRUM_ERROR, relative, spectrum_errors
from loraforge.factor.fleet import factorise_fleet
from loraforge.factor.gpu.check import chunks, root_spectrum
from loraforge.factor.gpu.drain import Drain
from loraforge.factor.gpu.engine import FAILED, Group, GroupFactors, Part
from loraforge.factor.gpu.fleet import PATHS, factorise_loaded
from loraforge.factor.gpu.loader import LoadedFleet, load_fleet
from loraforge.factor.gpu.ops import Backend
from loraforge.factor.gpu.shards import over_shards
from loraforge.factor.stages import Stages
from loraforge.fleet.peft_io import Adapter, LoraModule


@dataclass(frozen=True)
class _Spectra:
    """Spectra of one adapter, and the path of each module."""

    adapter: str
    modules: Mapping[str, LoraModule]
    sigma: Mapping[str, Floats]
    paths: Mapping[str, str]

    def spectrum(self, name: str) -> Floats:
        return self.sigma[name]


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
        self._measured: dict[str, _Spectra] = {}
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
                drain = Drain(self._backend.device)
                for adapter in mine:
                    modules = {
                        module.name: kept[adapter.name, module.name]
                        for module in adapter.modules
                        if (adapter.name, module.name) in kept
                    }
                    if len(modules) == len(adapter.modules):
                        yield Directions(adapter, cache_key(adapter), modules, drain, drain.here)
                    else:
                        refused.add(adapter.name)
                del kept, modules
        yield from self._rest.directions(ranks, dtype)
        again = self._on_the_side([adapter for adapter in self._fleet if adapter.name in refused])
        yield from again.directions(ranks, dtype)

    def _on_the_side(self, adapters: Sequence[Adapter]) -> CachedFleet:
        if not adapters:
            return CachedFleet([], [])
        with _timed(self._stages, self._backend.device):
            return CachedFleet(adapters, factorise_fleet(adapters, self._scratch))

    def _measure(self, adapters: list[Adapter]) -> tuple[_Shard, dict[str, _Spectra]]:
        """Spectra of the adapters whose every module is accepted, at the price of one direction a module."""
        loaded = load_fleet(adapters, self._backend.device, self._stages)
        found: dict[int, tuple[Floats, str]] = {}
        with _timed(self._stages, self._backend.device):
            one = [torch.ones(len(group), dtype=torch.int64) for group in loaded.groups]
            results = factorise_loaded(loaded, self._backend, ks=one)
            for group, members, result in zip(loaded.groups, loaded.members, results, strict=True):
                good = _spectra_hold(group, result, self._backend)
                for index, path, s, accepted in zip(
                    members.tolist(), result.path.tolist(), result.s.cpu().numpy(), good.tolist(), strict=True
                ):
                    if accepted:
                        found[index] = s, PATHS[path]
        spectra: dict[str, _Spectra] = {}
        start = 0
        for adapter in adapters:
            indices = range(start, start + len(adapter.modules))
            start = indices.stop
            if all(index in found for index in indices):
                names = [module.name for module in adapter.modules]
                spectra[adapter.name] = _Spectra(
                    adapter.name,
                    dict(zip(names, adapter.modules, strict=True)),
                    {name: found[index][0] for name, index in zip(names, indices, strict=True)},
                    {name: found[index][1] for name, index in zip(names, indices, strict=True)},
                )
        return _Shard(adapters, loaded), spectra

    def _kept(self, shard: _Shard, ranks: Ranks, dtype: torch.dtype | None) -> dict[tuple[str, str], Kept]:
        """What :meth:`_build` gives, which uses up the shard; nothing where that does not fit the device."""
        try:
            loaded = shard.loaded or load_fleet(shard.adapters, self._backend.device, self._stages)
            shard.loaded = None
            return self._build(loaded, ranks, dtype)
        except torch.OutOfMemoryError:
            return {}

    def _build(
        self, loaded: LoadedFleet, ranks: Ranks, dtype: torch.dtype | None
    ) -> dict[tuple[str, str], Kept]:
        """The kept directions of the modules of a shard that are accepted; views on the device."""
        k = torch.tensor(
            [
                ranks[adapter.name][module.name] if adapter.name in self._measured else 1
                for adapter, module in loaded.modules
            ]
        )
        with _timed(self._stages, self._backend.device):
            ordered, kept = _ordered_by(loaded, k)
            results = factorise_loaded(ordered, self._backend, ks=kept)
        found: dict[tuple[str, str], Kept] = {}
        for group, members, result, ks in zip(ordered.groups, ordered.members, results, kept, strict=True):
            target = dtype or torch.promote_types(group.a.dtype, group.b.dtype)
            for part in result.parts:
                exported = Part(part.start, part.stop, part.a.to(target), part.b.to(target))
                exact, rounded = _action_errors(group, part, exported, ks[part.start : part.stop])
                good = (exact < MAX_ACTION_ERROR) & (rounded <= accepted_error(target))
                good &= result.path[part.start : part.stop] != FAILED
                rows = zip(
                    members[part.start : part.stop].tolist(),
                    _pairs(exported, ks[part.start : part.stop]),
                    rounded.tolist(),
                    good.tolist(),
                    strict=True,
                )
                for index, (a, b), error, accepted in rows:
                    adapter, module = loaded.modules[index]
                    if accepted and adapter.name in self._measured:
                        spectra = self._measured[adapter.name]
                        found[adapter.name, module.name] = Kept(
                            a, b, error, spectra.sigma[module.name], spectra.paths[module.name]
                        )
        return found


@contextmanager
def _timed(stages: Stages, device: torch.device) -> Iterator[None]:
    """Stage ``factor``, which ends when the device has done its work."""
    with stages("factor"):
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _spectra_hold(group: Group, result: GroupFactors, backend: Backend) -> Tensor:
    """Whether the spectra [m] (bool, CPU) of a group are accepted."""
    errors = []
    for rows in chunks(group):
        batch = Batch.of(group.a[rows], group.b[rows], group.scale[rows])
        errors.append(spectrum_errors(root_spectrum(batch, backend), result.s[rows]))
    return (torch.cat(errors).cpu() < MAX_SPECTRUM_ERROR) & (result.path != FAILED)


def _ordered_by(loaded: LoadedFleet, k: Tensor) -> tuple[LoadedFleet, list[Tensor]]:
    """The same fleet, the rows of each group ordered by rank to keep; and those ranks. Replaces group by group."""
    members, kept = [], []
    for number, group in enumerate(loaded.groups):
        ks = k[loaded.members[number]]
        order = ks.argsort(stable=True)
        there = order.to(group.a.device)
        names = group.names and [group.names[index] for index in order.tolist()]
        loaded.groups[number] = Group(group.a[there], group.b[there], group.scale[there], names)
        members.append(loaded.members[number][order])
        kept.append(ks[order])
    return LoadedFleet(loaded.modules, loaded.groups, members, loaded.nbytes), kept


def _pairs(part: Part, ks: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """A [k, d_in] and B [d_out, k] of each matrix of a part that is ordered by k [n], both contiguous.

    Matrices of one k are cut to it together: a kernel for each would cost more than all else in an export.
    """
    start = 0
    for k, count in zip(
        *(found.tolist() for found in torch.unique_consecutive(ks, return_counts=True)), strict=True
    ):
        rows = slice(start, start + count)
        yield from zip(
            part.a[rows, :k].contiguous().unbind(), part.b[rows, :, :k].contiguous().unbind(), strict=True
        )
        start += count


def _action_errors(group: Group, ordered: Part, exported: Part, ks: Tensor) -> tuple[Tensor, Tensor]:
    """Action errors [n] of a part, as built and as exported, on the CPU:
    :func:`loraforge.export.certificate.action_error`, batched."""
    device = group.a.device
    x = probes(group.a.shape[2]).to(device)
    width = torch.arange(ordered.a.shape[1], device=device)
    found = []
    for chunk in chunks(group):
        start, stop = max(chunk.start, ordered.start), min(chunk.stop, ordered.stop)
        if start >= stop:
            continue
        rows, mine = slice(start, stop), slice(start - ordered.start, stop - ordered.start)
        live = (width < ks[mine].to(device)[:, None])[:, :, None]
        directions = leading_right_directions(ordered.a[mine].flatten(0, 1)).view_as(ordered.a[mine]) * live
        inside = group.a[rows].double() @ (directions.mT @ (directions @ x))
        wanted = group.scale[rows, None, None] * (group.b[rows].double() @ inside)
        norm = torch.linalg.vector_norm(wanted, dim=(1, 2))
        errors = []
        for part in (ordered, exported):
            got = part.b[mine].double() @ (live * (part.a[mine].double() @ x))
            errors.append(relative(torch.linalg.vector_norm(got - wanted, dim=(1, 2)), norm))
        found.append(torch.stack(errors))
    exact, rounded = torch.cat(found, dim=1).cpu()
    return exact, rounded
