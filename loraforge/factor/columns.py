"""What the cache states of an adapter's modules, in columns: a fleet of a thousand adapters has 252,000 of them, and an
object each would take more memory than their spectra."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from loraforge.factor.engine import Path as FactorPath

Spectrum = NDArray[np.float64]
PATHS: tuple[FactorPath, ...] = get_args(FactorPath)
# of the columns, one value a module; sigma has one a direction, module after module
TYPES = {
    "rank": np.int32,
    "d_in": np.int32,
    "d_out": np.int32,
    "scale": np.float64,
    "path": np.uint8,  # in PATHS
    "action_error": np.float64,
    "spectrum_error": np.float64,
}


@dataclass(frozen=True, slots=True)
class ModuleRecord:
    """What the cache states of a module besides its tensors; errors as in
    :class:`~loraforge.factor.engine.ModuleFactors`."""

    rank: int
    d_in: int
    d_out: int
    scale: float
    path: str
    action_error: float
    spectrum_error: float


class ModuleTable(Mapping[str, ModuleRecord]):
    """The modules of one adapter by name, in its order, with their effective spectra.

    ``columns`` has the arrays [M] that :data:`TYPES` names, and ``sigma``, float64 [sum of rank]. Raises ValueError
    where they do not fit together. A module's record is made when it is asked for.
    """

    def __init__(self, names: Sequence[str], columns: Mapping[str, NDArray[Any]]) -> None:
        self.names = _shared(tuple(names))
        self.columns = {name: np.ascontiguousarray(columns[name], kind) for name, kind in TYPES.items()}
        self.sigma: Spectrum = np.ascontiguousarray(columns["sigma"], np.float64)
        if {column.shape for column in self.columns.values()} != {(len(self.names),)}:
            raise ValueError("columns differ in length")
        if self.sigma.shape != (int(self.columns["rank"].sum()),):
            raise ValueError("the spectra are not as long as the ranks")

    @classmethod
    def of(cls, records: Mapping[str, ModuleRecord], sigma: Spectrum) -> ModuleTable:
        """The table of ``records``, whose spectra are ``sigma``, module after module."""
        columns: dict[str, NDArray[Any]] = {
            name: np.array(
                [
                    PATHS.index(getattr(record, name)) if name == "path" else getattr(record, name)
                    for record in records.values()
                ],
                dtype=kind,
            )
            for name, kind in TYPES.items()
        }
        return cls(tuple(records), columns | {"sigma": sigma})

    @property
    def rank(self) -> NDArray[np.int64]:
        """int64 [M], nominal ranks."""
        return self.columns["rank"].astype(np.int64)

    @property
    def cost(self) -> NDArray[np.int64]:
        """int64 [M], parameters of one direction."""
        cost: NDArray[np.int64] = self.columns["d_in"].astype(np.int64) + self.columns["d_out"]
        return cost

    def spectrum(self, name: str) -> Spectrum:
        """Effective singular values of a module, float64 [r], descending."""
        place = _places(self.names)[name]
        start = int(self.columns["rank"][:place].sum())
        return self.sigma[start : start + int(self.columns["rank"][place])]

    def __getitem__(self, name: str) -> ModuleRecord:
        place = _places(self.names)[name]
        values = {key: column[place].item() for key, column in self.columns.items()}
        return ModuleRecord(**values | {"path": PATHS[values["path"]]})

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@lru_cache(maxsize=256)
def _shared(names: tuple[str, ...]) -> tuple[str, ...]:
    """One copy of the names for all adapters that have the same: of one base model, most do."""
    return names


@lru_cache(maxsize=256)
def _places(names: tuple[str, ...]) -> dict[str, int]:
    return {name: place for place, name in enumerate(names)}
