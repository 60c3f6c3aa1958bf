"""The factor cache: one file an adapter, named by everything its contents depend on.

A changed weight, scale, method or source line gives another name, so that an entry is either right or absent.
Entries are written atomically and carry digests of their tensors and header: what is damaged is rebuilt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from loraforge import jit
from loraforge.digest import source_digest
from loraforge.errors import InputError
from loraforge.factor import gpu
from loraforge.factor.engine import Method, ModuleFactors
from loraforge.files import canonical_json, read_json, sha256_text, write_json, write_with
from loraforge.fleet.peft_io import Adapter
from loraforge.tensor_file import Views, contents_sha256, host_views, write_self_hashed

SCHEMA = "loraforge.factors/1"
TIMING_SCHEMA = "loraforge.factor-timing/1"
PRECISION = "fp64-core/fp32-factors"

Spectrum = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ModuleRecord:
    """What the cache states of a module besides its tensors; errors as in :class:`ModuleFactors`."""

    rank: int
    d_in: int
    d_out: int
    scale: float
    path: str
    action_error: float
    spectrum_error: float


@dataclass(frozen=True)
class BuildTiming:
    """Wall-clock seconds that building one entry took (reading, factorising, checking and writing); of what is
    built together on a GPU, the share by parameters.

    ``stages`` divides it: seconds by stage, averaged over ``workers`` threads, and ``write``.
    """

    seconds: float
    workers: int
    stages: dict[str, float]


@dataclass(frozen=True)
class CachedAdapter:
    """The ordered factors of one adapter, memory-mapped from the cache."""

    adapter: str
    path: Path
    modules: dict[str, ModuleRecord]

    def spectrum(self, name: str) -> Spectrum:
        """Effective singular values of module ``name``, float64 [r], descending."""
        found = self._spectra.get(name)
        if found is None:
            found = self._spectra[name] = self._read(f"{name}.S", None).numpy()
        return found

    def factors(self, name: str, k: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """A [k, d_in] and B [d_out, k], float32: the best rank-``k`` update is ``B @ A`` (default: full rank)."""
        a, b = self._read(f"{name}.A", k), self._read(f"{name}.B", None)
        return a, b if k is None else b[:, :k]

    @property
    def timing(self) -> BuildTiming | None:
        """How long building this entry took; None where that record was lost or damaged."""
        try:
            value = read_json(_timing_path(self.path))
            return BuildTiming(value["seconds"], value["workers"], value["stages"])
        except (InputError, LookupError, TypeError):
            return None

    @cached_property
    def _spectra(self) -> dict[str, Spectrum]:
        """Spectra that were read: allocation and export both ask for each."""
        return {}

    @cached_property
    def _handle(self) -> Any:
        """One mapping for all reads: opening parses a header of hundreds of tensors each time."""
        return safe_open(str(self.path), framework="pt")

    def _read(self, key: str, rows: int | None) -> torch.Tensor:
        try:
            tensor: torch.Tensor = (
                self._handle.get_tensor(key) if rows is None else self._handle.get_slice(key)[:rows]
            )
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"cannot be read from the factor cache ({error})",
                path=self.path,
                key=key,
                remedy="run the factor stage again",
            ) from error
        return tensor


def precision(method: Method = "auto") -> str:
    """What arithmetic makes an entry here: results of a GPU differ in rounding, and its kernels are source too."""
    if method == "reference" or not gpu.available():
        return PRECISION
    return f"{PRECISION}/gpu-{jit.source_hash()[:16]}"


def cache_key(adapter: Adapter, method: Method = "auto") -> str:
    """Hex SHA-256 of all that an entry depends on: weights, scales, method, precision and source."""
    return sha256_text(
        canonical_json(
            {
                "schema": SCHEMA,
                "weights": adapter.weights_sha256,
                "scales": {module.name: module.scale for module in adapter.modules},
                "method": method,
                "precision": precision(method),
                "source": source_digest("factor"),
                **adapter.derivation,
            }
        )
    )


def cache_path(adapter: Adapter, cache: Path, method: Method = "auto") -> Path:
    """Where the entry of ``adapter`` is, or would be."""
    return Path(cache) / "factors" / f"{cache_key(adapter, method)}.safetensors"


def _timing_path(path: Path) -> Path:
    return path.with_suffix(".timing.json")


def store(
    adapter: Adapter, path: Path, modules: Mapping[str, ModuleFactors], views: Views = host_views
) -> CachedAdapter:
    """Write the entry of ``adapter`` to ``path``, atomically. ``views`` brings the factors from where they are."""
    tensors = {f"{name}.S": factors.s for name, factors in modules.items()}
    for name, factors in modules.items():
        tensors |= {f"{name}.A": factors.a, f"{name}.B": factors.b}
    records: dict[str, ModuleRecord] = {}
    for module in adapter.modules:
        factors = modules[module.name]
        records[module.name] = ModuleRecord(
            module.rank,
            module.d_in,
            module.d_out,
            module.scale,
            factors.path,
            factors.action_error,
            factors.spectrum_error,
        )
    header = {
        "schema": SCHEMA,
        "adapter": adapter.name,
        "weights_sha256": adapter.weights_sha256,
        "modules": {name: vars(record) for name, record in records.items()},
    }

    def metadata(sha256: str) -> dict[str, str]:
        stated = header | {"tensors_sha256": sha256}
        return {"loraforge": canonical_json(stated | {"header_sha256": sha256_text(canonical_json(stated))})}

    write_with(path, lambda temporary: write_self_hashed(temporary, tensors, metadata, views))
    return CachedAdapter(adapter.name, path, records)


def store_timing(entry: CachedAdapter, timing: BuildTiming) -> None:
    """Keep how long building ``entry`` took beside it."""
    write_json(
        _timing_path(entry.path), {"schema": TIMING_SCHEMA, "adapter": entry.adapter, **asdict(timing)}
    )


def find(adapter: Adapter, path: Path) -> CachedAdapter | None:
    """The entry of ``adapter`` at ``path``, every byte checked; None where there is none, or none that is whole."""
    try:
        sha256, metadata = contents_sha256(path)
        header = json.loads(metadata["loraforge"])
        stated = header.pop("header_sha256")  # of ranks, paths and errors: what the tensors do not hold
        records = {module.name: ModuleRecord(**header["modules"][module.name]) for module in adapter.modules}
        whole = (
            header["schema"] == SCHEMA
            and header["tensors_sha256"] == sha256
            and stated == sha256_text(canonical_json(header))
        )
    except (OSError, LookupError, AttributeError, TypeError, ValueError, RecursionError):
        return None
    return CachedAdapter(adapter.name, path, records) if whole else None
