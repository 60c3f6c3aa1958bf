"""The factor cache: one file an adapter, named by everything its contents depend on.

A changed weight, scale, method or source line gives another name, so that an entry is either right or absent.
Entries are written atomically and carry a digest of their tensors: what is damaged is rebuilt.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from loraforge import jit
from loraforge.digest import source_digest
from loraforge.errors import InputError
from loraforge.factor import gpu
from loraforge.factor.engine import Method, ModuleFactors, factorise_adapter, paths_of
from loraforge.factor.pool import worker_pool
from loraforge.factor.stages import Stages
from loraforge.files import canonical_json, read_json, sha256_text, write_json, write_with
from loraforge.fleet.peft_io import Adapter
from loraforge.progress import progress, say

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
    """Wall-clock seconds that building one entry took (reading, factorising, checking and writing).

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
        spectrum: Spectrum = self._read(f"{name}.S", None).numpy()
        return spectrum

    def factors(self, name: str, k: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """A [k, d_in] and B [d_out, k], float32: the best rank-``k`` update is ``B @ A`` (default: full rank)."""
        a, b = self._read(f"{name}.A", k), self._read(f"{name}.B", None)
        return a, b if k is None else b[:, :k]

    @property
    def timing(self) -> BuildTiming | None:
        """How long building this entry took; None where that record was lost."""
        path = _timing_path(self.path)
        if not path.exists():
            return None
        value = read_json(path)
        return BuildTiming(value["seconds"], value["workers"], value["stages"])

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
            }
        )
    )


def cache_path(adapter: Adapter, cache: Path, method: Method = "auto") -> Path:
    """Where the entry of ``adapter`` is, or would be."""
    return Path(cache) / "factors" / f"{cache_key(adapter, method)}.safetensors"


def open_cached(adapter: Adapter, cache: Path, *, method: Method = "auto") -> CachedAdapter:
    """Open the entry of ``adapter``, every byte checked. Raises InputError where it is absent or damaged."""
    path = cache_path(adapter, cache, method)
    if not path.exists():
        raise InputError(
            f"no factors of adapter {adapter.name}", path=path, remedy="run loraforge factor with this cache"
        )
    found = _load(adapter, path)
    if found is None:
        raise InputError(
            f"damaged factors of adapter {adapter.name}",
            path=path,
            remedy="run loraforge factor again to rebuild",
        )
    return found


def factorise_fleet(
    adapters: Sequence[Adapter],
    cache: Path,
    *,
    method: Method = "auto",
    workers: int | None = None,
) -> list[CachedAdapter]:
    """Build the entries that are missing or damaged, an adapter at a time, and open all of them.

    Every finished adapter stays: an interrupted run resumes. ``workers`` defaults to the available CPUs. Raises
    InputError for unusable factors, LoraForgeError where acceptance fails, OutputError where writing does.
    """
    paths_of(method)
    if torch.cuda.is_available() and not gpu.available():
        say("there is a GPU, but no compiler for its kernels: working on the CPU (see loraforge doctor)")
    opened: list[CachedAdapter] = []
    with worker_pool(workers) as pool, progress("factor", len(adapters)) as ticker:
        for adapter in adapters:
            path = cache_path(adapter, cache, method)
            found = _load(adapter, path) if path.exists() else None
            if found is None:
                started, stages = time.perf_counter(), Stages()
                modules = factorise_adapter(adapter, method=method, pool=pool, stages=stages)
                shares = {name: seconds / pool.workers for name, seconds in stages.seconds.items()}
                with (write := Stages())("write"):
                    found = _store(adapter, path, modules)
                timing = BuildTiming(time.perf_counter() - started, pool.workers, shares | write.seconds)
                write_json(
                    _timing_path(path), {"schema": TIMING_SCHEMA, "adapter": adapter.name, **asdict(timing)}
                )
                ticker.advance(adapter.name)
            else:
                ticker.advance(f"{adapter.name} (cached)")
            opened.append(found)
    return opened


def _timing_path(path: Path) -> Path:
    return path.with_suffix(".timing.json")


def _store(adapter: Adapter, path: Path, modules: Mapping[str, ModuleFactors]) -> CachedAdapter:
    tensors: dict[str, npt.NDArray[Any]] = {}
    records: dict[str, ModuleRecord] = {}
    for module in adapter.modules:
        factors = modules[module.name]
        for suffix, tensor in (("S", factors.s), ("A", factors.a), ("B", factors.b)):
            tensors[f"{module.name}.{suffix}"] = tensor.numpy()
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
        "tensors_sha256": _digest(tensors),
        "modules": {name: asdict(record) for name, record in records.items()},
    }
    # through Python's own write: safetensors reports a full disk as an error of its own kind
    contents = save(tensors, {"loraforge": canonical_json(header)})
    write_with(path, lambda temporary: temporary.write_bytes(contents))
    return CachedAdapter(adapter.name, path, records)


def _load(adapter: Adapter, path: Path) -> CachedAdapter | None:
    """Open an entry; None where it is not whole."""
    try:
        with safe_open(str(path), framework="np") as handle:
            header = json.loads(handle.metadata()["loraforge"])
            tensors = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
        records = {module.name: ModuleRecord(**header["modules"][module.name]) for module in adapter.modules}
        whole = header["schema"] == SCHEMA and header["tensors_sha256"] == _digest(tensors)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError):
        return None
    return CachedAdapter(adapter.name, path, records) if whole else None


def _digest(tensors: Mapping[str, npt.NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + b"\0")
        digest.update(np.ascontiguousarray(tensors[name]).data)
    return digest.hexdigest()
