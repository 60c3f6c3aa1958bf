"""Write a compressed fleet: every adapter in every layout, and the manifest, as one folder that appears whole."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save

from loraforge import __version__
from loraforge.allocate.allocation import AllocationFile
from loraforge.config import Layout
from loraforge.errors import InputError
from loraforge.export.certificate import PROBE_SEED, PROBES, action_error, energy_split
from loraforge.export.layouts import adapter_config, layout_rank, module_rank, pad_factors
from loraforge.export.manifest import (
    ADAPTER_MANIFEST_FILE,
    MANIFEST_FILE,
    AdapterEntry,
    AdapterManifest,
    Certificate,
    FleetEntry,
    Manifest,
    ModuleEntry,
    Weights,
    save_manifest,
)
from loraforge.export.options import LAYOUTS, parse_dtype
from loraforge.factor.cache import CachedAdapter
from loraforge.factor.pool import worker_pool
from loraforge.files import atomic_folder, canonical_json, refuse_to_replace, sha256_text, write_json
from loraforge.fleet.peft_config import CONFIG_NAME, WEIGHTS_NAME
from loraforge.fleet.peft_io import Adapter, FactorReader, LoraModule
from loraforge.progress import progress

# Rounding two factors to a type of unit roundoff u perturbs their product by about u; four times that, or the
# acceptance of the factor paths where that is larger, means that values were lost, not rounded.
_ACCEPTED = {dtype: max(2 * torch.finfo(dtype).eps, 1e-4) for dtype in (torch.bfloat16, torch.float16)}
_ACCEPTED_WIDE = 1e-4


def accepted_error(dtype: torch.dtype) -> float:
    """Largest action error of factors exported as ``dtype``."""
    return _ACCEPTED.get(dtype, _ACCEPTED_WIDE)


@dataclass(frozen=True)
class _Module:
    entry: ModuleEntry
    a: torch.Tensor
    b: torch.Tensor


def cast_factors(
    adapter: Adapter, name: str, factors: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round A and B to ``dtype``. Raises InputError, naming the module, where a value overflows."""
    a, b = (factor.to(dtype) for factor in factors)
    for factor, source in zip((a, b), factors, strict=True):
        if not bool(torch.isfinite(factor).all()):
            raise InputError(
                f"values up to {float(source.abs().max()):.3g} overflow {_dtype_name(dtype)}",
                path=adapter.path,
                key=name,
                remedy="export with --dtype bfloat16 or float32",
            )
    return a, b


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _module(
    adapter: Adapter,
    reader: FactorReader,
    cached: CachedAdapter,
    module: LoraModule,
    ranks: Mapping[str, int],
    layouts: Sequence[Layout],
    dtype: torch.dtype,
) -> _Module:
    k = ranks[module.name]
    ordered = cached.factors(module.name, k)
    a, b = cast_factors(adapter, module.name, ordered, dtype)
    error = action_error(reader.factors(module), module.scale, ordered[0], (a, b))
    if error > accepted_error(dtype):
        raise InputError(
            f"{_dtype_name(dtype)} cannot hold these factors (action error {error:.1e}, largest value "
            f"{float(max(factor.abs().max() for factor in ordered)):.1e})",
            path=adapter.path,
            key=module.name,
            remedy="export with --dtype bfloat16 or float32; if it persists, delete the factor cache",
        )
    energy, lost = energy_split(cached.spectrum(module.name), k)
    width = module.d_in + module.d_out
    entry = ModuleEntry(
        k=k,
        r=module.rank,
        scale=module.scale,
        d_in=module.d_in,
        d_out=module.d_out,
        path=cached.modules[module.name].path,
        certificate=Certificate(action_error=error, retained_energy=energy, relative_error=lost),
        compact_parameters=k * width,
        physical_bytes={
            layout: module_rank(layout, module.name, ranks) * width * dtype.itemsize for layout in layouts
        },
    )
    return _Module(entry, a, b)


def write_weights(path: Path, tensors: dict[str, torch.Tensor], rank: int) -> Weights:
    """Write a weight file (safetensors) of an adapter of ``rank``, and describe it."""
    # Serialised here, not by safetensors' own file writer: that hides the system's error (a full disk).
    payload = save(tensors, metadata={"format": "pt"})
    path.write_bytes(payload)
    return Weights(rank=rank, sha256=hashlib.sha256(payload).hexdigest(), bytes=len(payload))


def write_adapter(
    out: Path,
    adapter: Adapter,
    cached: CachedAdapter,
    ranks: Mapping[str, int],
    *,
    layouts: Sequence[Layout] = LAYOUTS,
    dtype: torch.dtype | None = torch.bfloat16,
) -> AdapterEntry:
    """Write ``out/<layout>/<adapter>/`` (configuration and weights) and return its manifest entry.

    ``ranks`` gives k of every module; ``dtype`` None keeps each module's own type. Not atomic by itself:
    ``out`` is to be a temporary folder. Raises InputError where ``dtype`` cannot hold the factors.
    """
    ranks = {module.name: ranks[module.name] for module in adapter.modules}
    with adapter.reader() as reader, worker_pool() as pool:

        def build(module: LoraModule) -> _Module:
            return _module(adapter, reader, cached, module, ranks, layouts, dtype or module.dtype)

        names = [module.name for module in adapter.modules]
        modules = dict(zip(names, pool.map(build, adapter.modules), strict=True))
        passthrough = {key: reader.tensor(key) for key in adapter.passthrough}
        written: dict[Layout, Weights] = {}
        for layout in layouts:
            tensors = dict(passthrough)
            for module in adapter.modules:
                record = modules[module.name]
                a, b = pad_factors(record.a, record.b, module_rank(layout, module.name, ranks))
                tensors[module.a_key], tensors[module.b_key] = a.contiguous(), b.contiguous()
            folder = out / layout / adapter.name
            folder.mkdir(parents=True)
            written[layout] = write_weights(folder / WEIGHTS_NAME, tensors, layout_rank(layout, ranks))
            write_json(folder / CONFIG_NAME, adapter_config(adapter.config, layout, ranks))
    return AdapterEntry(
        weights_sha256=adapter.weights_sha256,
        factor_key=cached.path.stem,
        original_parameters=adapter.n_parameters,
        original_bytes=adapter.weights_path.stat().st_size,
        passthrough=adapter.passthrough,
        layouts=written,
        modules={name: record.entry for name, record in modules.items()},
    )


def export_fleet(
    fleet: Sequence[Adapter],
    factors: Callable[[Adapter], CachedAdapter],
    allocation: AllocationFile,
    out: Path,
    *,
    layouts: Sequence[Layout] = LAYOUTS,
    dtype: str = "bfloat16",
    force: bool = False,
) -> Manifest:
    """Write ``out`` as a whole: manifest.json and ``<layout>/<adapter>/`` of every adapter, one at a time.

    Parameters
    ----------
    fleet: the originals, of one base model.
    factors: opens the ordered factors of an adapter.
    allocation: retained ranks of exactly these adapters and modules.
    dtype: a key of :data:`loraforge.export.options.DTYPES`.
    force: replace a non-empty ``out``, once the new one is complete.

    Raises InputError where allocation and fleet differ or ``dtype`` cannot hold a factor, UsageError for an
    unknown ``dtype``, OutputError for an output that exists, holds an original, is read-only or does not fit on
    the disk.
    """
    target = None if parse_dtype(dtype) == "source" else getattr(torch, dtype)
    _require_same_modules(fleet, allocation)
    refuse_to_replace(out, [adapter.path for adapter in fleet])
    entries: dict[str, AdapterEntry] = {}
    with atomic_folder(out, force=force) as temporary:
        with progress("export", len(fleet)) as ticker:
            for adapter in fleet:
                ranks = allocation.ranks[adapter.name]
                entries[adapter.name] = write_adapter(
                    temporary, adapter, factors(adapter), ranks, layouts=layouts, dtype=target
                )
                ticker.advance(adapter.name)
        manifest = Manifest(
            fleet=FleetEntry(
                name=allocation.fleet,
                base_model=fleet[0].base_model,
                policy=allocation.policy,
                budget=allocation.budget,
                floor=allocation.floor,
                spent=allocation.spent,
                slack=allocation.slack,
                optimality_gap=allocation.optimality_gap,
                retained_energy=allocation.retained_energy,
                layouts=tuple(layouts),
                dtype=dtype,
                tool_version=__version__,
                allocation_sha256=sha256_text(
                    canonical_json(allocation.model_dump(mode="json", by_alias=True))
                ),
                probes=PROBES,
                probe_seed=PROBE_SEED,
            ),
            adapters=entries,
        )
        for layout in layouts:
            for name, entry in entries.items():
                save_manifest(
                    temporary / layout / name / ADAPTER_MANIFEST_FILE,
                    AdapterManifest(name=name, layout=layout, fleet=manifest.fleet, adapter=entry),
                )
        save_manifest(temporary / MANIFEST_FILE, manifest)
    return manifest


def _require_same_modules(fleet: Sequence[Adapter], allocation: AllocationFile) -> None:
    remedy = "allocate again for this fleet"
    have = {adapter.name: {module.name: module.rank for module in adapter.modules} for adapter in fleet}
    for extra in allocation.ranks.keys() - have.keys():
        raise InputError(f"the allocation has adapter {extra!r}, the fleet has not", remedy=remedy)
    for name, modules in have.items():
        ranks = allocation.ranks.get(name)
        if ranks is None:
            raise InputError(f"the fleet has adapter {name!r}, the allocation has not", remedy=remedy)
        if odd := sorted(ranks.keys() ^ modules.keys()):
            raise InputError(
                "allocation and adapter differ in this module", path=name, key=odd[0], remedy=remedy
            )
        for module, k in ranks.items():
            if k > modules[module]:
                raise InputError(
                    f"allocated rank {k} exceeds the original's {modules[module]}",
                    path=name,
                    key=module,
                    remedy=remedy,
                )
