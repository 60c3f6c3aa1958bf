"""Spectra: singular values of every module's effective update, and how long it took to get them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Discriminator, Field, Tag, TypeAdapter, model_validator

from loraforge.errors import InputError
from loraforge.evidence.targets.base import Claim, Record, Summary, Target, at_most

MAX_ACTION_ERROR = 3e-5  # relative, on random probes; paper, section 4.3
MAX_SPECTRUM_ERROR = 1e-4  # relative, against a dense FP64 SVD; paper, section 4.3


class Spectrum(Record):
    """Descending singular values of s B A of one module."""

    adapter: str
    module: str
    kind: str
    layer: Annotated[int, Field(ge=0)] | None
    rank: int = Field(ge=1)
    scale: float
    sigma: list[Annotated[float, Field(ge=0)]]
    path: str
    action_error: float = Field(ge=0)
    spectrum_error: float = Field(ge=0)

    @model_validator(mode="after")
    def _ordered(self) -> Spectrum:
        if len(self.sigma) != self.rank:
            raise ValueError(f"sigma holds {len(self.sigma)} values at rank {self.rank}")
        if any(later > earlier for earlier, later in zip(self.sigma, self.sigma[1:], strict=False)):
            raise ValueError("sigma is not in descending order")
        return self


class Timing(Record):
    """Wall-clock seconds to factorise the whole fleet: each pass, and their median as ``seconds``."""

    record: Literal["timing"]
    name: Literal["factor"]
    seconds: float = Field(gt=0)
    passes: list[Annotated[float, Field(gt=0)]] = Field(min_length=1)


def _kind(value: Any) -> str:
    return str(value.get("record", "spectrum")) if isinstance(value, dict) else "spectrum"


def rank_for_energy(sigma: Sequence[float], tau: float = 0.9) -> int:
    """k(tau): the fewest leading directions whose squared energy reaches ``tau`` of the whole (paper, section 2).

    A zero update needs none.
    """
    energy = np.cumsum(np.square(np.asarray(sigma, dtype=np.float64)))
    if energy[-1] == 0:
        return 0
    # Rounding in the sum must not ask for one direction more where the share is reached exactly.
    return int(np.searchsorted(energy, tau * energy[-1] * (1 - 1e-12))) + 1


class SpectraTarget(Target[Spectrum | Timing]):
    """``spectra``: one Spectrum a module and one Timing."""

    name: ClassVar = "spectra"
    figures: ClassVar = ("spectra",)
    sources: ClassVar = ("factor", "fleet")
    record: ClassVar[TypeAdapter[Any]] = TypeAdapter(
        Annotated[
            Annotated[Spectrum, Tag("spectrum")] | Annotated[Timing, Tag("timing")], Discriminator(_kind)
        ]
    )

    def check(self, records: Sequence[Spectrum | Timing], path: Any) -> None:
        names = [(item.adapter, item.module) for item in spectra(records)]
        if not names:
            raise InputError("holds no spectrum", path=path)
        if len(set(names)) != len(names):
            raise InputError("states a module twice", path=path)
        if sum(isinstance(item, Timing) for item in records) != 1:
            raise InputError(
                "must hold exactly one timing record",
                path=path,
                remedy="factorise the fleet with an empty cache",
            )

    def summarise(self, records: Sequence[Spectrum | Timing], fleet: str) -> Summary:
        items = spectra(records)
        timing = next(item for item in records if isinstance(item, Timing))
        fractions: dict[str, list[float]] = {}
        for item in items:
            fractions.setdefault(item.kind, []).append(rank_for_energy(item.sigma) / item.rank)
        summary: Summary = {
            f"{fleet}.adapters": len(self.adapters(records)),
            f"{fleet}.modules": len(items),
            f"{fleet}.directions": sum(item.rank for item in items),
            f"{fleet}.factor_s": statistics.median(timing.passes),
            f"{fleet}.rank90_fraction": statistics.median(
                value for values in fractions.values() for value in values
            ),
            "max_action_error": max(item.action_error for item in items),
            "max_spectrum_error": max(item.spectrum_error for item in items),
        }
        for kind in sorted(fractions):
            summary[f"{fleet}.rank90_fraction.{kind}"] = statistics.median(fractions[kind])
        for route in sorted({item.path for item in items}):
            summary[f"{fleet}.modules_by_{route}"] = sum(item.path == route for item in items)
        return summary

    def claims(self, records: Sequence[Spectrum | Timing]) -> list[Claim]:
        items = spectra(records)
        action = max(item.action_error for item in items)
        spectrum = max(item.spectrum_error for item in items)
        return [
            at_most("relative action error", action, MAX_ACTION_ERROR),
            at_most("relative spectrum error", spectrum, MAX_SPECTRUM_ERROR),
        ]

    def adapters(self, records: Sequence[Spectrum | Timing]) -> list[str]:
        return sorted({item.adapter for item in spectra(records)})


def spectra(records: Sequence[Spectrum | Timing]) -> list[Spectrum]:
    """The spectra among the records, in their order."""
    return [item for item in records if isinstance(item, Spectrum)]
