"""Refine every adapter of a compressed fleet and write it again: same ranks, layouts and files, other numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loraforge.activation.answers import OpenModel, answer
from loraforge.activation.fisher import identity
from loraforge.allocate.allocation import AllocationFile
from loraforge.allocate.policy import Spectra
from loraforge.allocate.problem import Floats
from loraforge.digest import source_digest
from loraforge.errors import InputError, IntegrityError
from loraforge.export.certificate import probes, relative_error
from loraforge.export.directions import Directions, Kept, Ranks, cast_factors
from loraforge.export.manifest import Manifest, load_manifest
from loraforge.export.writer import export_fleet
from loraforge.factor.cache import CachedAdapter, find, store
from loraforge.factor.engine import ModuleFactors
from loraforge.factor.fleet import hash_weights
from loraforge.files import canonical_json, refuse_non_empty, refuse_to_replace, sha256_text
from loraforge.fleet.base_model import tensors_sha256
from loraforge.fleet.peft_io import Adapter, open_adapter
from loraforge.progress import progress
from loraforge.quality.arms import Update, original_updates
from loraforge.refine import SOURCE
from loraforge.refine.distillation import DEFAULTS, RefineSettings, distil
from loraforge.workers import each


@dataclass(frozen=True)
class _Pair:
    """An adapter as it was trained, and as it was compressed: at its retained ranks, scale 1."""

    original: Adapter
    compressed: Adapter
    ranks: Mapping[str, int]

    def truncated(self) -> dict[str, Update]:
        found: dict[str, Update] = {}
        with self.compressed.reader() as reader:
            for module in self.compressed.modules:
                a, b = reader.factors(module)
                k = self.ranks[module.name]
                found[module.name] = Update(a[:k], b[:, :k], module.scale)
        return found


def refine_fleet(
    compressed: Path,
    originals: Sequence[Adapter],
    base: Path,
    prompts: Mapping[str, Sequence[str]],
    out: Path,
    *,
    cache: Path,
    device: str = "cpu",
    jobs: int = 1,
    settings: RefineSettings = DEFAULTS,
    force: bool = False,
) -> Manifest:
    """Refine the output of ``loraforge compress`` in ``compressed`` and write the like of it to ``out``.

    Parameters
    ----------
    originals: the adapters that it was made from; others are ignored. prompts: unlabelled ones, by adapter.
    cache: folder that keeps what is finished, by a name that hashes all that it depends on, for runs that resume.
    jobs: processes, each with a model of its own, that share ``device``: one leaves a GPU idle between its kernels.

    Raises InputError for an adapter without its original or without prompts, IntegrityError where the original has
    other weights, and everything that writing does; ``out`` appears whole or not at all.
    """
    manifest = load_manifest(compressed)
    folder = compressed.parent if compressed.is_file() else compressed
    refuse_non_empty(out, force=force)
    refuse_to_replace(out, [folder, base, cache, *(adapter.path for adapter in originals)])
    pairs = _pairs(manifest, folder, originals)
    for name in pairs:
        if not prompts.get(name):
            raise InputError("no prompts of this adapter", key=name, remedy="give it some")
    base_sha256 = tensors_sha256(base / "model.safetensors")
    entries: dict[str, CachedAdapter] = {}
    missing: dict[str, tuple[Any, ...]] = {}
    with progress("refine", len(pairs)) as ticker:
        for name, pair in pairs.items():
            key = _key(pair, base_sha256, prompts[name], device, settings)
            path = cache / "refined" / f"{key}.safetensors"
            entry = find(pair.compressed, path)
            if entry is None:
                missing[name] = (base, device, pair, prompts[name], path, settings)
            else:
                entries[name] = entry
                ticker.advance(f"{name} as before")
        for name, (entry, curve) in each(_refine, missing, jobs):
            entries[name] = entry
            ticker.advance(f"{name} divergence {curve[0]:.3f} -> {curve[-1]:.3f}")
    fleet = [pair.original for pair in pairs.values()]
    return export_fleet(
        fleet,
        RefinedFleet(fleet, entries),
        _allocation(manifest),
        out,
        layouts=manifest.fleet.layouts,
        dtype=manifest.fleet.dtype,
        force=force,
    )


class RefinedFleet:
    """A :class:`~loraforge.export.directions.Source` of factors that are taken as they are."""

    def __init__(self, fleet: Sequence[Adapter], entries: Mapping[str, CachedAdapter]) -> None:
        self._fleet, self._entries = fleet, entries

    @property
    def spectra(self) -> Iterable[Spectra]:
        return self._entries.values()

    def directions(self, ranks: Ranks, dtype: torch.dtype | None) -> Iterator[Directions]:
        for adapter in self._fleet:
            entry = self._entries[adapter.name]
            kept: dict[str, Kept] = {}
            for module in adapter.modules:
                if module.name not in entry.modules:
                    continue
                exact = entry.factors(module.name)
                a, b = cast_factors(adapter, module.name, exact, dtype or module.dtype)
                x = probes(module.d_in)
                rounded, wanted = (right.double() @ (left.double() @ x) for left, right in ((a, b), exact))
                spectrum = _two_parts(len(a), entry.modules[module.name].action_error)
                kept[module.name] = Kept(a, b, relative_error(rounded, wanted), spectrum, "refined")
            yield Directions(adapter, entry.path.stem, kept)


def _pairs(manifest: Manifest, folder: Path, originals: Sequence[Adapter]) -> dict[str, _Pair]:
    by_name = {adapter.name: adapter for adapter in originals}
    layout = min(manifest.fleet.layouts, key=("ragged", "padded").index)
    found: dict[str, _Pair] = {}
    for name, entry in manifest.adapters.items():
        original = by_name.get(name)
        if original is None:
            raise InputError(
                "its original is not among the adapters given",
                path=folder,
                key=name,
                remedy="name its folder",
            )
        compressed = open_adapter(folder / layout / name)
        ranks = {module: record.k for module, record in entry.modules.items()}
        if {module.name for module in compressed.modules} != ranks.keys():
            raise IntegrityError(
                "has other modules than the manifest", path=compressed.path, remedy="compress the fleet again"
            )
        found[name] = _Pair(original, compressed, ranks)
    hash_weights([adapter for pair in found.values() for adapter in (pair.original, pair.compressed)])
    for name, pair in found.items():
        if pair.original.weights_sha256 != manifest.adapters[name].weights_sha256:
            raise IntegrityError(
                "is not what the fleet was compressed from",
                path=pair.original.path,
                remedy="compress it again",
            )
        if pair.compressed.weights_sha256 != manifest.adapters[name].layouts[layout].sha256:
            raise IntegrityError(
                "is not what was exported", path=pair.compressed.path, remedy="compress the fleet again"
            )
    return found


def _key(pair: _Pair, base_sha256: str, texts: Sequence[str], device: str, settings: RefineSettings) -> str:
    return sha256_text(
        canonical_json(
            {
                "original": identity(pair.original),
                "compressed": pair.compressed.weights_sha256,
                "base": base_sha256,
                "texts": list(texts),
                "device": device.partition(":")[0],
                "settings": asdict(settings),
                "source": source_digest(*SOURCE),
            }
        )
    )


def _refine(
    base: Path, device: str, pair: _Pair, texts: Sequence[str], path: Path, settings: RefineSettings
) -> tuple[CachedAdapter, tuple[float, ...]]:
    model = OpenModel.of(base, device)
    updates = original_updates(pair.original)
    try:
        model.merged.merge(updates)
        answered = answer(model.causal, model.tokenizer, texts, model.pad, settings)
    finally:
        model.merged.reset()
    refined = distil(model.causal, updates, pair.truncated(), answered, model.pad, settings)
    ranks = {module.name: module.rank for module in pair.compressed.modules}
    modules = {
        name: ModuleFactors(
            torch.zeros(ranks[name], dtype=torch.float64),  # they are no singular directions
            update.a,
            update.b,
            "refined",
            _distance(updates[name], update),
            0.0,
        )
        for name, update in refined.updates.items()
    }
    return store(pair.compressed, path, modules), refined.curve


def _distance(original: Update, refined: Update) -> float:
    """|dW - dW'|_F / |dW|_F, at most 1, from factors alone; 0 for no update."""
    a = torch.cat((original.a.double(), refined.a.double()))
    b = torch.cat((original.scale * original.b.double(), -refined.scale * refined.b.double()), dim=1)
    gram = (b.mT @ b) * (a @ a.mT)
    r = len(original.a)
    whole, off = float(gram[:r, :r].sum()), max(0.0, float(gram.sum()))
    return min(1.0, float(np.sqrt(off / whole))) if whole > 0 else 0.0


def _two_parts(k: int, distance: float) -> Floats:
    """A spectrum, float64 [k + 1], whose ``k`` first keep all but ``distance`` of a norm of 1: what certificates say of
    directions that have no singular values."""
    return np.array([np.sqrt(1 - distance**2), *[0.0] * (k - 1), distance])


def _allocation(manifest: Manifest) -> AllocationFile:
    fleet = manifest.fleet
    return AllocationFile(
        fleet=fleet.name,
        policy=fleet.policy,
        budget=fleet.budget,
        floor=fleet.floor,
        spent=fleet.spent,
        slack=fleet.slack,
        optimality_gap=fleet.optimality_gap,
        retained_energy=fleet.retained_energy,
        ranks={
            name: {module: record.k for module, record in entry.modules.items()}
            | dict.fromkeys(entry.dropped, 0)
            for name, entry in manifest.adapters.items()
        },
    )
