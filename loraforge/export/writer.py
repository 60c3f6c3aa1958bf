"""Write a compressed fleet: every adapter in every layout, and the manifest, as one folder that appears whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from loraforge import __version__
from loraforge.allocate.allocation import AllocationFile
from loraforge.config import Layout
from loraforge.errors import InputError
from loraforge.export.certificate import PROBE_SEED, PROBES, energy_splits
from loraforge.export.directions import Directions, Kept, Source
from loraforge.export.layouts import adapter_config, layout_rank, module_ranks, pad_factors, shared_ranks
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
from loraforge.export.portable import portable_name
from loraforge.files import atomic_folder, canonical_json, refuse_to_replace, sha256_text, write_json
from loraforge.fleet.peft_config import CONFIG_NAME, WEIGHTS_NAME
from loraforge.fleet.peft_io import Adapter, LoraModule
from loraforge.fleet.variants.lora import stack_experts
from loraforge.progress import progress
from loraforge.tensor_file import write_tensors
from loraforge.threads import Background, available_cpus

METADATA = {"format": "pt"}  # of every weight file, as PEFT has it


def write_adapter(
    out: Path, directions: Directions, ranks: Mapping[str, int], *, layouts: Sequence[Layout] = LAYOUTS
) -> AdapterEntry:
    """Write ``out/<layout>/<adapter>/`` (configuration and weights) and return its manifest entry.

    ``ranks`` gives k of every module; those of 0 are left out. Not atomic by itself: ``out`` is to be a temporary
    folder. Raises InputError where a module of rank 0 cannot be left out.
    """
    adapter = directions.adapter
    modules = kept_modules(adapter, ranks)
    ranks = {module.name: ranks[module.name] for module in modules}
    config = adapter.config
    if len(modules) < len(adapter.modules):  # its short list of targets would name those that are left out
        config = {**config, "target_modules": list(ranks)}
    beside = _beside_the_factors(adapter)
    shared = shared_ranks(modules, ranks)
    stored = {layout: module_ranks(layout, shared) for layout in layouts}
    written: dict[Layout, Weights] = {}
    for layout in layouts:
        with directions.here():
            tensors = beside | factor_tensors(directions, stored[layout])
        folder = out / layout / adapter.name
        folder.mkdir(parents=True)
        file = write_tensors(folder / WEIGHTS_NAME, tensors, METADATA, directions.views)
        written[layout] = Weights(rank=layout_rank(layout, shared), sha256=file.sha256, bytes=file.bytes)
        write_json(folder / CONFIG_NAME, adapter_config(config, layout, shared, modules))
    splits = energy_splits(
        [directions.modules[module.name].sigma for module in modules], list(ranks.values())
    )
    return AdapterEntry(
        weights_sha256=adapter.weights_sha256,
        factor_key=directions.factor_key,
        original_parameters=adapter.n_parameters,
        original_bytes=adapter.weights.bytes,
        passthrough=adapter.passthrough,
        layouts=written,
        modules={
            module.name: _entry(
                module,
                directions.modules[module.name],
                ranks[module.name],
                split,
                {layout: stored[layout][module.name] for layout in layouts},
            )
            for module, split in zip(modules, splits, strict=True)
        },
        dropped=tuple(module.name for module in adapter.modules if module.name not in ranks),
    )


def kept_modules(adapter: Adapter, ranks: Mapping[str, int]) -> list[LoraModule]:
    """Modules of ``adapter`` that keep a direction. Raises InputError where one that does not has to stay."""
    for module in adapter.modules:
        if ranks[module.name] == 0 and (module.stack is not None or module.bias_name is not None):
            raise InputError(
                "shares its tensors with other experts, or has a bias, and cannot be left out",
                path=adapter.path,
                key=module.name,
                remedy="choose a policy whose rank floor is 1",
            )
    kept = [module for module in adapter.modules if ranks[module.name] > 0]
    if not kept:
        raise InputError("keeps no direction at all", path=adapter.path, remedy="allocate again")
    return kept


def _beside_the_factors(adapter: Adapter) -> dict[str, torch.Tensor]:
    """Tensors by name that no layout changes: those passed through, and the biases of factors of scale 1."""
    biased = [module for module in adapter.modules if module.bias_name is not None]
    if not adapter.passthrough and not biased:
        return {}
    with adapter.reader() as reader:
        tensors = {name: reader.tensor(name) for name in adapter.passthrough}
        for module in biased:
            if module.bias_name is not None and (bias := reader.bias(module)) is not None:
                tensors[module.bias_name] = bias
    return tensors


def factor_tensors(directions: Directions, ranks: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Factors by name, padded to ``ranks``; of experts in a stack, one pair of tensors for all."""
    tensors: dict[str, torch.Tensor] = {}
    stacks: dict[tuple[str, str], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for module in directions.adapter.modules:
        if module.name not in ranks:
            continue
        kept = directions.modules[module.name]
        pair = pad_factors(kept.a, kept.b, ranks[module.name])
        if module.stack is None:
            tensors[module.a_name], tensors[module.b_name] = pair
        else:  # in the order of their numbers, as the adapter has them
            stacks.setdefault((module.a_name, module.b_name), []).append(pair)
    for (a_name, b_name), pairs in stacks.items():
        tensors[a_name], tensors[b_name] = stack_experts(pairs)
    return tensors


def _entry(
    module: LoraModule, kept: Kept, k: int, split: tuple[float, float], stored: Mapping[Layout, int]
) -> ModuleEntry:
    width = module.d_in + module.d_out
    energy, lost = split
    return ModuleEntry(
        k=k,
        r=module.rank,
        scale=module.scale,
        d_in=module.d_in,
        d_out=module.d_out,
        path=kept.path,
        certificate=Certificate(action_error=kept.action_error, retained_energy=energy, relative_error=lost),
        compact_parameters=k * width,
        physical_bytes={layout: rank * width * kept.a.dtype.itemsize for layout, rank in stored.items()},
    )


def _write_with_manifests(
    out: Path,
    directions: Directions,
    ranks: Mapping[str, int],
    layouts: Sequence[Layout],
    fleet: FleetEntry,
) -> AdapterEntry:
    """:func:`write_adapter`, and the adapter's slice of the manifest in every layout."""
    entry = write_adapter(out, directions, ranks, layouts=layouts)
    name = directions.adapter.name
    for layout in layouts:
        save_manifest(
            out / layout / name / ADAPTER_MANIFEST_FILE,
            AdapterManifest(name=name, layout=layout, fleet=fleet, adapter=entry),
        )
    return entry


def _fleet_entry(
    allocation: AllocationFile, base_model: str, layouts: Sequence[Layout], dtype: str
) -> FleetEntry:
    return FleetEntry(
        name=allocation.fleet,
        base_model=portable_name(base_model),
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
        allocation_sha256=sha256_text(canonical_json(allocation.model_dump(mode="json", by_alias=True))),
        probes=PROBES,
        probe_seed=PROBE_SEED,
    )


def export_fleet(
    fleet: Sequence[Adapter],
    source: Source,
    allocation: AllocationFile,
    out: Path,
    *,
    layouts: Sequence[Layout] = LAYOUTS,
    dtype: str = "bfloat16",
    force: bool = False,
) -> Manifest:
    """Write ``out`` as a whole: manifest.json and ``<layout>/<adapter>/`` of every adapter, some at a time.

    Parameters
    ----------
    fleet: the originals, of one base model.
    source: the same adapters, factorised.
    allocation: retained ranks of exactly these adapters and modules.
    dtype: a key of :data:`loraforge.export.options.DTYPES`.
    force: replace a non-empty ``out``, once the new one is complete.

    Raises InputError where allocation and fleet differ or ``dtype`` cannot hold a factor, UsageError for an
    unknown ``dtype``, OutputError for an output that exists, holds an original, is read-only or does not fit on
    the disk.
    """
    target = None if parse_dtype(dtype) == "source" else getattr(torch, dtype)
    require_same_modules(fleet, allocation)
    refuse_to_replace(out, [adapter.path for adapter in fleet])
    writers = min(8, available_cpus())
    with atomic_folder(out, force=force) as temporary:
        names = []
        described = _fleet_entry(allocation, fleet[0].base_model, layouts, dtype)
        with (
            progress("export", len(fleet)) as ticker,
            Background[AdapterEntry](writers, limit=writers) as background,
        ):
            for directions in source.directions(allocation.ranks, target):
                names.append(directions.adapter.name)
                background.submit(
                    _write_with_manifests,
                    temporary,
                    directions,
                    allocation.ranks[names[-1]],
                    layouts,
                    described,
                )
                ticker.advance(names[-1])
            written = dict(zip(names, background.results(), strict=True))
        manifest = Manifest(
            fleet=described, adapters={adapter.name: written[adapter.name] for adapter in fleet}
        )
        save_manifest(temporary / MANIFEST_FILE, manifest)
    return manifest


def require_same_modules(fleet: Sequence[Adapter], allocation: AllocationFile) -> None:
    """Raise InputError where an allocation is not one of exactly these adapters and modules."""
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
