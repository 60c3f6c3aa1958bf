"""Write a compressed fleet: every adapter in every layout, and the manifest, as one folder that appears whole."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from loraforge import __version__
from loraforge.config import Layout
from loraforge.errors import InputError, UsageError
from loraforge.export.certificate import PROBE_SEED, PROBES, action_error, retained_energy
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
from loraforge.factor.cache import CachedAdapter
from loraforge.files import atomic_folder, write_text
from loraforge.fleet.peft_config import CONFIG_NAME
from loraforge.fleet.peft_io import WEIGHTS_NAME, Adapter, FactorReader, LoraModule
from loraforge.progress import progress

DTYPES: dict[str, torch.dtype | None] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "source": None,
}
LAYOUTS: tuple[Layout, ...] = ("ragged", "padded")
# Rounding two factors to a type of unit roundoff u perturbs their product by about u; four times that, or the
# acceptance of the factor paths where that is larger, means that values were lost, not rounded.
_ACCEPTED = {dtype: max(2 * torch.finfo(dtype).eps, 1e-4) for dtype in (torch.bfloat16, torch.float16)}
_ACCEPTED_WIDE = 1e-4


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
    if error > _ACCEPTED.get(dtype, _ACCEPTED_WIDE):
        raise InputError(
            f"{_dtype_name(dtype)} cannot hold these factors (action error {error:.1e}, largest value "
            f"{float(max(factor.abs().max() for factor in ordered)):.1e})",
            path=adapter.path,
            key=module.name,
            remedy="export with --dtype bfloat16 or float32; if it persists, delete the factor cache",
        )
    energy = retained_energy(cached.spectrum(module.name), k)
    width = module.d_in + module.d_out
    entry = ModuleEntry(
        k=k,
        r=module.rank,
        scale=module.scale,
        d_in=module.d_in,
        d_out=module.d_out,
        path=cached.modules[module.name].path,
        certificate=Certificate(
            action_error=error, retained_energy=energy, relative_error=max(0.0, 1.0 - energy) ** 0.5
        ),
        compact_parameters=k * width,
        physical_bytes={
            layout: module_rank(layout, module.name, ranks) * width * dtype.itemsize for layout in layouts
        },
    )
    return _Module(entry, a, b)


def _write_weights(path: Path, tensors: dict[str, torch.Tensor], rank: int) -> Weights:
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
    with adapter.reader() as reader:
        modules = {
            module.name: _module(adapter, reader, cached, module, ranks, layouts, dtype or module.dtype)
            for module in adapter.modules
        }
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
            written[layout] = _write_weights(folder / WEIGHTS_NAME, tensors, layout_rank(layout, ranks))
            write_text(folder / CONFIG_NAME, _config_text(adapter_config(adapter.config, layout, ranks)))
    return AdapterEntry(
        weights_sha256=adapter.weights_sha256,
        factor_key=cached.key,
        original_parameters=adapter.n_parameters,
        original_bytes=adapter.weights_path.stat().st_size,
        passthrough=adapter.passthrough,
        layouts=written,
        modules={name: record.entry for name, record in modules.items()},
    )
