"""What ``compress`` would keep, write and take, found out without writing a byte.

Ranks and sizes are those that :func:`~loraforge.compress.compress` then gives: spectra come from the factor cache
where it has them, and else from the same paths, whose factors are thrown away. What they lack is acceptance: a matrix
that fails it, and is then done by another path, may have another spectrum in the last digits. Missing spectra are
computed on the CPU, where a GPU would round differently.

The seconds are an estimate (:class:`Estimate`): what the preview does too is measured in it; construction and export
are measured on one adapter, and taken to go on at that pace.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from loraforge.activation.entries import entry_key
from loraforge.activation.moments import Moments
from loraforge.allocate.budget import Budget
from loraforge.allocate.problem import Floats
from loraforge.compress import Choice, check_request, choose, widest
from loraforge.config import Layout, Policy
from loraforge.export.directions import every_row, keep_factors
from loraforge.export.options import LAYOUTS
from loraforge.export.sizes import weight_bytes
from loraforge.factor.batch import Batch
from loraforge.factor.cache import CachedAdapter, find
from loraforge.factor.engine import construct, factorise_adapter, group_by_shape
from loraforge.factor.fleet import hash_weights
from loraforge.factor.pool import Pool, worker_pool
from loraforge.factor.stages import Stages
from loraforge.files import refuse_to_replace
from loraforge.fleet.lock import fleet_name
from loraforge.fleet.options import DEFAULT, ReadOptions
from loraforge.fleet.peft_io import Adapter, FactorReader, LoraModule, open_fleet
from loraforge.fleet.source import lock_among, resolve_fleet
from loraforge.progress import Timer, track

_HASHED = 32 << 20  # bytes that the pace of hashing is measured on


@dataclass(frozen=True)
class Estimate:
    """Seconds that the run would take, by its stages, and what they rest on.

    Parameters
    ----------
    seconds: ``verify``, ``hash``, ``factor``, ``allocate`` and ``export``, as :func:`~loraforge.compress.compress`
        counts them.
    basis: by the same stages, in words: measured now, or on which adapter and scaled by what.
    adapter: the one that was built and certified in memory for it.
    missing: adapters whose factors no cache has.
    """

    seconds: dict[str, float]
    basis: dict[str, str]
    adapter: str
    missing: int

    @property
    def total(self) -> float:
        """Seconds of all stages together."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Preview:
    """What ``compress`` would do to ``fleet``; ``bytes`` of weight files by adapter and layout, ``seconds`` by what
    the preview itself spent them on."""

    fleet: Sequence[Adapter]
    choice: Choice
    bytes: dict[str, dict[Layout, int]]
    layouts: tuple[Layout, ...]
    dtype: str
    seconds: dict[str, float]
    estimate: Estimate


@dataclass(frozen=True)
class _Spectra:
    """Spectra of one adapter without factors."""

    adapter: str
    modules: Mapping[str, LoraModule]
    sigma: Mapping[str, Floats]

    def spectrum(self, name: str) -> Floats:
        return self.sigma[name]


def preview(
    source: Sequence[Path],
    budget: Budget,
    out: Path,
    *,
    cache: Path | None,
    policy: Policy | None = None,
    layouts: Sequence[Layout] = LAYOUTS,
    dtype: str = "bfloat16",
    force: bool = False,
    options: ReadOptions = DEFAULT,
    moments: Path | None = None,
) -> Preview:
    """What :func:`~loraforge.compress.compress` would do with the same arguments.

    Writes nothing, fetches nothing (InputError where a lock names what the user's store lacks), and raises what that
    would raise before it writes: of an output that cannot be, a budget, an input.
    """
    chosen, known, width = check_request(source, out, cache, policy, dtype, force, moments)
    target = None if dtype == "source" else getattr(torch, dtype)
    stages = Stages()
    with stages("verify"):
        lock = lock_among(source)
        fleet = open_fleet(source, options) if lock is None else resolve_fleet(lock, options, fetch=False)
        refuse_to_replace(out, [adapter.path for adapter in fleet])
    with stages("hash"):
        hash_weights(fleet)
        if known is not None:
            for adapter in fleet:
                known.require(adapter)
    with stages("cache"):
        found = {} if cache is None else {adapter.name: _cached(adapter, cache, known) for adapter in fleet}
    missing = [adapter for adapter in fleet if found.get(adapter.name) is None]
    with worker_pool() as pool:
        with stages("spectra"):
            spectra = [
                found.get(adapter.name) or _spectra_of(adapter, known, pool)
                for adapter in track(fleet, "spectra", len(fleet))
            ]
        with stages("allocate"):
            choice = choose(fleet_name(source), spectra, chosen, budget, width or widest(fleet))
        ranks = choice.allocation.ranks
        with stages("sizes"):
            sizes = {
                adapter.name: weight_bytes(adapter, ranks[adapter.name], layouts, target) for adapter in fleet
            }
        with stages("sample"):
            like = sorted(missing or fleet, key=_work)
            sample = like[len(like) // 2]
            pace = _measure(sample, found.get(sample.name), ranks[sample.name], target, known, pool)
    written = sum(size for by_layout in sizes.values() for size in by_layout.values())
    estimate = _estimate(fleet, missing, sample, pace, written, stages)
    return Preview(fleet, choice, sizes, tuple(layouts), dtype, stages.seconds, estimate)


def _cached(adapter: Adapter, cache: Path, moments: Moments | None) -> CachedAdapter | None:
    folder = "factors" if moments is None else "activation"
    return find(adapter, Path(cache) / folder / f"{entry_key(adapter, moments=moments)}.safetensors")


def _spectra_of(adapter: Adapter, moments: Moments | None, pool: Pool) -> _Spectra:
    by_name = {module.name: module for module in adapter.modules}
    with adapter.reader() as reader:
        if moments is not None:
            sigma = {name: factors[0].numpy() for name, factors in _ordered(reader, moments, pool).items()}
        else:
            groups = group_by_shape((m.name, m.d_in, m.d_out, m.rank) for m in adapter.modules)
            parts = pool.map(lambda names: _spectra_of_batch(reader, [by_name[n] for n in names]), groups)
            sigma = {name: spectrum for part in parts for name, spectrum in part.items()}
    return _Spectra(adapter.name, by_name, sigma)


def _spectra_of_batch(reader: FactorReader, modules: Sequence[LoraModule]) -> dict[str, Floats]:
    """Spectra of modules of one shape: of the Gram path, and of TSQR for what that flags, as construction has them."""
    pairs = [reader.factors(module) for module in modules]
    a, b = (torch.stack([pair[side] for pair in pairs]) for side in (0, 1))
    batch = Batch.of(a, b, torch.tensor([module.scale for module in modules], dtype=torch.float64))
    ordered, index = construct(batch, "gram", Stages())
    found = dict(zip(index.tolist(), ordered.s, strict=True))
    if rest := [j for j in range(len(modules)) if j not in found]:
        again, _ = construct(batch.select(torch.tensor(rest)), "tsqr", Stages())
        found |= zip(rest, again.s, strict=True)
    return {module.name: found[j].numpy() for j, module in enumerate(modules)}


def _ordered(
    reader: FactorReader, moments: Moments, pool: Pool
) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    def order(module: LoraModule) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return moments.ordered(reader.adapter, module, *reader.factors(module))

    modules = reader.adapter.modules
    return {module.name: found for module, found in zip(modules, pool.map(order, modules), strict=True)}


@dataclass(frozen=True)
class _Pace:
    """Seconds that building and that certifying one adapter took, and seconds a byte of hashing."""

    factor: float
    export: float
    byte: float


def _measure(
    adapter: Adapter,
    cached: CachedAdapter | None,
    ranks: Mapping[str, int],
    dtype: torch.dtype | None,
    moments: Moments | None,
    pool: Pool,
) -> _Pace:
    """Build ``adapter`` (unless it is ``cached``) and certify its kept directions, in memory."""
    with adapter.reader() as reader:
        with (building := Timer()):
            if cached is not None:
                ordered = {name: cached.factors(name, k) for name, k in ranks.items()}
            elif moments is not None:
                whole = _ordered(reader, moments, pool)
                ordered = {name: (a.float(), b.float()) for name, (_, a, b) in whole.items()}
            else:
                made = factorise_adapter(adapter, method="auto", pool=pool, stages=Stages())
                ordered = {name: (module.a, module.b) for name, module in made.items()}

        def certify(module: LoraModule) -> None:
            k = ranks[module.name]
            a, b = ordered[module.name]
            path = "gram" if moments is None else moments.factors_path
            built = a if path == "fisher" else None
            rows = built if cached is None else every_row(cached, module.name)
            keep_factors(
                adapter,
                module,
                reader.factors(module),
                (a[:k], b[:, :k]),
                dtype or module.dtype,
                path=path,
                every_row=rows,
            )

        with (certifying := Timer()):
            pool.map(certify, [module for module in adapter.modules if ranks[module.name]])
    with (hashing := Timer()):
        hashlib.sha256(bytes(_HASHED))
    return _Pace(building.s, certifying.s, hashing.s / _HASHED)


def _work(adapter: Adapter) -> float:
    """What construction costs, as :func:`~loraforge.factor.engine.group_by_shape` counts it."""
    return sum(m.rank**2 * float(m.d_in + m.d_out + 20 * m.rank) for m in adapter.modules)


def _estimate(
    fleet: Sequence[Adapter],
    missing: Sequence[Adapter],
    sample: Adapter,
    pace: _Pace,
    written: int,
    stages: Stages,
) -> Estimate:
    hashed = f"hashing at {1e-9 / pace.byte:.2f} GB/s"
    build = stages.seconds["cache"]
    words = "all factors are cached"
    if missing:
        build += pace.factor * sum(map(_work, missing)) / _work(sample)
        build += pace.byte * 4 * sum(adapter.n_parameters for adapter in missing)
        words = (
            f"{len(missing)} of {len(fleet)} adapters at the pace of {sample.name}, "
            f"by rank^2 (d_in + d_out + 20 rank), and {hashed}"
        )
    export = pace.export * sum(adapter.n_parameters for adapter in fleet) / sample.n_parameters
    return Estimate(
        seconds={
            "verify": stages.seconds["verify"],
            "hash": stages.seconds["hash"],
            "factor": build,
            "allocate": stages.seconds["allocate"],
            "export": export + pace.byte * written,
        },
        basis={
            "verify": "measured",
            "hash": "measured",
            "factor": words,
            "allocate": "measured",
            "export": f"at the pace of {sample.name}, by parameters, and {hashed}",
        },
        adapter=sample.name,
        missing=len(missing),
    )
