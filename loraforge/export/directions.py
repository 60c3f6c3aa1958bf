"""What is exported of an adapter: the directions that are kept, rounded and certified; and where they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from loraforge.allocate.policy import Spectra
from loraforge.allocate.problem import Floats
from loraforge.errors import InputError
from loraforge.export.certificate import action_error, oblique_action_error, output_action_error
from loraforge.factor import gpu
from loraforge.factor.cache import CachedAdapter
from loraforge.factor.engine import Method
from loraforge.factor.pool import worker_pool
from loraforge.factor.stages import Stages
from loraforge.fleet.peft_io import Adapter, FactorReader, LoraModule
from loraforge.tensor_file import Views, host_views

Ranks = Mapping[str, Mapping[str, int]]

# Rounding two factors to a type of unit roundoff u perturbs their product by about u; four times that, or the
# acceptance of the factor paths where that is larger, means that values were lost, not rounded.
_ACCEPTED = {dtype: max(2 * torch.finfo(dtype).eps, 1e-4) for dtype in (torch.bfloat16, torch.float16)}
_ACCEPTED_WIDE = 1e-4


@dataclass(frozen=True)
class Kept:
    """One module: A [k, d_in] and B [d_out, k] as they will be written, the error of their certificate, the effective
    spectrum [r] that they lead, and the path that made them."""

    a: torch.Tensor
    b: torch.Tensor
    action_error: float
    sigma: Floats
    path: str


@dataclass(frozen=True)
class Directions:
    """One adapter: its modules by name, and the key that the cache has, or would have, for its ordered factors.

    ``views`` brings the bytes of their tensors, from where those are; other tensors are made of them in ``here``.
    """

    adapter: Adapter
    factor_key: str
    modules: Mapping[str, Kept]
    views: Views = host_views
    here: Callable[[], AbstractContextManager[None]] = nullcontext


class Source(Protocol):
    """A factorised fleet: what allocation and export need of it."""

    @property
    def spectra(self) -> Iterable[Spectra]:
        """Spectra of every adapter, in the fleet's order."""

    def directions(self, ranks: Ranks, dtype: torch.dtype | None) -> Iterator[Directions]:
        """Every adapter once, in any order, at ``ranks`` and as ``dtype`` (None: each module's own).

        Raises InputError, naming the module, where ``dtype`` cannot hold the factors.
        """


class CachedFleet:
    """A :class:`Source` over cache entries of the adapters of ``fleet``, in its order.

    It makes one adapter's kept directions at a time.
    """

    def __init__(self, fleet: Sequence[Adapter], entries: Sequence[CachedAdapter]) -> None:
        self._fleet, self.spectra = fleet, entries

    def directions(self, ranks: Ranks, dtype: torch.dtype | None) -> Iterator[Directions]:
        with worker_pool() as pool:
            for adapter, cached in zip(self._fleet, self.spectra, strict=True):
                k = ranks[adapter.name]
                with adapter.reader() as reader:

                    def keep(
                        module: LoraModule,
                        cached: CachedAdapter = cached,
                        reader: FactorReader = reader,
                        k: Mapping[str, int] = k,
                    ) -> Kept:
                        return _keep(cached, reader, module, k[module.name], dtype or module.dtype)

                    kept = pool.map(keep, adapter.modules)
                modules = {module.name: record for module, record in zip(adapter.modules, kept, strict=True)}
                yield Directions(adapter, cached.path.stem, modules)


def cached_source(
    fleet: Sequence[Adapter],
    entries: Sequence[CachedAdapter],
    *,
    method: Method = "auto",
    stages: Stages | None = None,
) -> Source:
    """Cache entries of the adapters of ``fleet``, in its order, that ``method`` has made; exported on the GPU, if any.

    ``stages`` gets what a GPU takes to ``load`` and to ``factor`` while directions are asked for.
    """
    backend = None if method == "reference" else gpu.kernels()
    if method == "reference" or backend is None:
        return CachedFleet(fleet, entries)
    from loraforge.export.rebuilt import RebuiltFleet  # not imported where there is no GPU

    return RebuiltFleet(fleet, entries, backend, method, Stages() if stages is None else stages)


def accepted_error(dtype: torch.dtype) -> float:
    """Largest action error of factors exported as ``dtype``."""
    return _ACCEPTED.get(dtype, _ACCEPTED_WIDE)


def cast_factors(
    adapter: Adapter, name: str, factors: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round A and B to ``dtype``. Raises InputError, naming the module, where a value overflows."""
    a, b = (factor.to(dtype) for factor in factors)
    for factor, source in zip((a, b), factors, strict=True):
        if not bool(torch.isfinite(factor).all()):
            raise InputError(
                f"values up to {float(source.abs().max()):.3g} overflow {dtype_name(dtype)}",
                path=adapter.path,
                key=name,
                remedy="export with --dtype bfloat16 or float32",
            )
    return a, b


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def keep_factors(
    adapter: Adapter,
    module: LoraModule,
    ordered: tuple[torch.Tensor, torch.Tensor],
    dtype: torch.dtype,
    certify: Callable[[tuple[torch.Tensor, torch.Tensor]], float],
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """``ordered`` A [k, d_in] and B [d_out, k] as ``dtype``, and the action error that ``certify`` finds of these.

    Raises InputError, naming the module, where ``dtype`` cannot hold them.
    """
    a, b = cast_factors(adapter, module.name, ordered, dtype)
    error = certify((a, b))
    if error > accepted_error(dtype):
        raise InputError(
            f"{dtype_name(dtype)} cannot hold these factors (action error {error:.1e}, largest value "
            f"{float(max(factor.abs().max() for factor in ordered)):.1e})",
            path=adapter.path,
            key=module.name,
            remedy="export with --dtype bfloat16 or float32; if it persists, delete the factor cache",
        )
    return a, b, error


def _keep(
    cached: CachedAdapter, reader: FactorReader, module: LoraModule, k: int, dtype: torch.dtype
) -> Kept:
    ordered = cached.factors(module.name, k)
    path = cached.modules[module.name].path
    original = reader.factors(module)

    def certify(exported: tuple[torch.Tensor, torch.Tensor]) -> float:
        """By the side on which factors of this path are orthogonal, if any."""
        if path == "whitened":
            return output_action_error(original, module.scale, ordered[1], exported)
        if path == "fisher":
            every_row, _ = cached.factors(module.name)
            return oblique_action_error(original, module.scale, every_row, exported)
        return action_error(original, module.scale, ordered[0], exported)

    a, b, error = keep_factors(reader.adapter, module, ordered, dtype, certify)
    return Kept(a, b, error, cached.spectrum(module.name), path)
