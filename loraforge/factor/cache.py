"""The factor cache: two files an adapter, named by everything their contents depend on.

``factors/<key>`` has the ordered factors, 4 bytes a parameter; ``spectra/<key>`` some 30 kB of what allocation reads.
A fleet is planned from the latter alone, which may be kept without the former. A changed weight, scale, method or
source line gives another name, so that an entry is either right or absent. Both are written atomically and carry
digests of their tensors and header: what is damaged is rebuilt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from loraforge import jit
from loraforge.config import Keep
from loraforge.digest import source_digest
from loraforge.errors import InputError
from loraforge.factor import gpu
from loraforge.factor.columns import TYPES, ModuleRecord, ModuleTable, Spectrum
from loraforge.factor.engine import Method, ModuleFactors
from loraforge.files import canonical_json, read_json, sha256_text, write_json, write_with
from loraforge.fleet.peft_io import Adapter
from loraforge.tensor_file import Views, contents_sha256, host_views, write_self_hashed

SCHEMA = "loraforge.factors/1"
SPECTRA_SCHEMA = "loraforge.spectra/1"
TIMING_SCHEMA = "loraforge.factor-timing/1"
PRECISION = "fp64-core/fp32-factors"


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
    """One adapter in the cache: spectra in memory; factors, where they were kept, memory-mapped from ``path``."""

    adapter: str
    path: Path
    modules: ModuleTable

    def spectrum(self, name: str) -> Spectrum:
        """Effective singular values of module ``name``, float64 [r], descending."""
        return self.modules.spectrum(name)

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


def content_digest(adapter: Adapter) -> str:
    """Hex SHA-256 of all that an entry depends on that is the adapter's own: weights, scales, how factors are
    derived."""
    return sha256_text(
        canonical_json(
            {
                "weights": adapter.weights_sha256,
                "scales": {module.name: module.scale for module in adapter.modules},
                **adapter.derivation,
            }
        )
    )


def key_of(content: str, method: Method = "auto") -> str:
    """The key of an adapter with that :func:`content_digest`: method, precision and source come to it."""
    return sha256_text(
        canonical_json(
            {
                "schema": SCHEMA,
                "content": content,
                "method": method,
                "precision": precision(method),
                "source": source_digest("factor"),
            }
        )
    )


def cache_key(adapter: Adapter, method: Method = "auto") -> str:
    """Hex SHA-256 of all that an entry depends on: weights, scales, method, precision and source."""
    return key_of(content_digest(adapter), method)


def cache_path(adapter: Adapter, cache: Path, method: Method = "auto") -> Path:
    """Where the entry of ``adapter`` is, or would be."""
    return entry_path(cache_key(adapter, method), cache)


def entry_path(key: str, cache: Path) -> Path:
    """Where the entry of that key is, or would be."""
    return Path(cache) / "factors" / f"{key}.safetensors"


def spectra_path(path: Path) -> Path:
    """Where the spectra of the entry at ``path`` are, or would be."""
    return path.parent.parent / "spectra" / path.name


def _timing_path(path: Path) -> Path:
    return path.with_suffix(".timing.json")


def store(
    adapter: Adapter,
    path: Path,
    modules: Mapping[str, ModuleFactors],
    views: Views = host_views,
    *,
    keep: Keep = "factors",
) -> CachedAdapter:
    """Write the entry of ``adapter`` to ``path`` and its spectra beside it, each atomically; the latter alone where
    ``keep`` says so. ``views`` brings the factors from where they are."""
    records = {
        module.name: ModuleRecord(
            module.rank,
            module.d_in,
            module.d_out,
            module.scale,
            modules[module.name].path,
            modules[module.name].action_error,
            modules[module.name].spectrum_error,
        )
        for module in adapter.modules
    }
    if keep == "factors":
        tensors = {f"{name}.S": factors.s for name, factors in modules.items()}
        for name, factors in modules.items():
            tensors |= {f"{name}.A": factors.a, f"{name}.B": factors.b}
        stated = {
            "schema": SCHEMA,
            "adapter": adapter.name,
            "weights_sha256": adapter.weights_sha256,
            "modules": {name: asdict(record) for name, record in records.items()},
        }
        write_with(path, lambda place: write_self_hashed(place, tensors, _metadata(stated), views))
    sigma = bytearray()
    for view in views(modules[name].s for name in records):
        sigma += view
    entry = CachedAdapter(adapter.name, path, ModuleTable.of(records, np.frombuffer(sigma, np.float64)))
    store_spectra(entry)
    return entry


def store_spectra(entry: CachedAdapter) -> None:
    """Write the spectra of ``entry`` beside it, atomically."""
    table = entry.modules
    stated = {"schema": SPECTRA_SCHEMA, "key": entry.path.stem, "modules": list(table.names)}
    tensors = {name: torch.from_numpy(column) for name, column in table.columns.items()}
    tensors["sigma"] = torch.from_numpy(table.sigma)
    write_with(spectra_path(entry.path), lambda place: write_self_hashed(place, tensors, _metadata(stated)))


def _metadata(header: Mapping[str, Any]) -> Callable[[str], Mapping[str, str]]:
    """Metadata of a file that states the hash of its tensors, and that of all it states."""

    def metadata(sha256: str) -> dict[str, str]:
        stated = {**header, "tensors_sha256": sha256}
        return {"loraforge": canonical_json(stated | {"header_sha256": sha256_text(canonical_json(stated))})}

    return metadata


def _header(path: Path, schema: str) -> dict[str, Any]:
    """What a file states, every byte of it checked. Raises what reading, or a damaged file, raises."""
    sha256, metadata = contents_sha256(path)
    header: dict[str, Any] = json.loads(metadata["loraforge"])
    stated = header.pop("header_sha256")  # of ranks, paths and errors: what the tensors do not hold
    if (header["schema"], header["tensors_sha256"]) != (schema, sha256):
        raise ValueError("not the file that was written")
    if stated != sha256_text(canonical_json(header)):
        raise ValueError("not the header that was written")
    return header


def store_timing(entry: CachedAdapter, timing: BuildTiming) -> None:
    """Keep how long building ``entry`` took beside it."""
    write_json(
        _timing_path(entry.path), {"schema": TIMING_SCHEMA, "adapter": entry.adapter, **asdict(timing)}
    )


_DAMAGE = (OSError, LookupError, AttributeError, TypeError, ValueError, RecursionError, SafetensorError)


def find(adapter: Adapter, path: Path) -> CachedAdapter | None:
    """The entry of ``adapter`` at ``path``, every byte checked; None where there is none, or none that is whole."""
    try:
        header = _header(path, SCHEMA)
        records = {module.name: ModuleRecord(**header["modules"][module.name]) for module in adapter.modules}
        with safe_open(str(path), framework="np") as file:
            sigma = np.concatenate([file.get_tensor(f"{name}.S") for name in records])
        return CachedAdapter(adapter.name, path, ModuleTable.of(records, sigma))
    except _DAMAGE:
        return None


def find_spectra(adapter: str, path: Path) -> CachedAdapter | None:
    """The spectra of the entry at ``path`` for the adapter named ``adapter``, every byte of them checked; the factors
    are not looked at, and need not be there. None where there are none, or none that are whole."""
    place = spectra_path(path)
    try:
        header, columns = _header(place, SPECTRA_SCHEMA), load_file(place)
        if header["key"] != path.stem:  # a file under another's name
            return None
        return CachedAdapter(
            adapter, path, ModuleTable(header["modules"], {n: columns[n] for n in (*TYPES, "sigma")})
        )
    except _DAMAGE:
        return None
