"""The allocation problem as flat arrays: what the policies read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Problem:
    """M modules of a fleet and their effective spectra.

    Parameters
    ----------
    names: (adapter, module) of each module.
    rank: int64 [M], nominal ranks r_m >= 1.
    cost: int64 [M], parameters of one direction, d_in + d_out.
    sigma: float64 [sum of rank], effective singular values s_m sigma_mj, module after module, each
        non-increasing. Effective means that the scale of the adapter is included.

    Raises ValueError where the arrays do not fit together or a spectrum is negative, rising or not finite.
    """

    names: Sequence[tuple[str, str]]
    rank: Ints
    cost: Ints
    sigma: Floats

    def __post_init__(self) -> None:
        modules = len(self.names)
        if self.rank.shape != (modules,) or self.cost.shape != (modules,):
            raise ValueError(f"{modules} names, rank {self.rank.shape} and cost {self.cost.shape} disagree")
        if modules == 0 or self.rank.min() < 1 or self.cost.min() < 1:
            raise ValueError("a problem needs modules, each of rank and cost at least 1")
        if self.sigma.shape != (int(self.offsets[-1]),):
            raise ValueError(f"sigma {self.sigma.shape} is not the sum of ranks {int(self.offsets[-1])}")
        rises = np.diff(self.sigma) > 0
        rises[self.offsets[1:-1] - 1] = False  # from one module to the next
        if rises.any() or not np.isfinite(self.sigma).all() or self.sigma.min() < 0:
            raise ValueError("every spectrum must be finite, non-negative and non-increasing")

    @cached_property
    def offsets(self) -> Ints:
        """int64 [M + 1]: module m owns ``sigma[offsets[m]:offsets[m + 1]]``."""
        return np.concatenate(([0], np.cumsum(self.rank, dtype=np.int64)))

    @cached_property
    def place(self) -> Ints:
        """int64 [sum of rank]: 1, 2, ... within each module."""
        return np.arange(1, len(self.sigma) + 1) - np.repeat(self.offsets[:-1], self.rank)

    @cached_property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters, in the order of their first module."""
        return tuple(dict.fromkeys(adapter for adapter, _ in self.names))

    @cached_property
    def owner(self) -> Ints:
        """int64 [M]: the adapter of each module, as an index into ``adapters``."""
        index = {adapter: number for number, adapter in enumerate(self.adapters)}
        return np.array([index[adapter] for adapter, _ in self.names], dtype=np.int64)

    def by_adapter(self, values: Floats) -> Floats:
        """Sums of ``values`` (float64 [M]) over the modules of each adapter, float64 [adapters]."""
        sums: Floats = np.bincount(self.owner, values, len(self.adapters)).astype(np.float64)
        return sums

    def members(self) -> Iterator[tuple[Ints, Problem]]:
        """Each adapter alone: the indices of its modules (int64), and the problem that they make."""
        direction_owner = np.repeat(self.owner, self.rank)
        for number in range(len(self.adapters)):
            index = np.flatnonzero(self.owner == number)
            yield (
                index,
                Problem(
                    [self.names[i] for i in index.tolist()],
                    self.rank[index],
                    self.cost[index],
                    self.sigma[direction_owner == number],
                ),
            )

    def parameters(self, k: Ints) -> int:
        """Compact parameters of ranks ``k`` (int64 [M])."""
        return int(k @ self.cost)

    def module_energy(self, k: Ints) -> Floats:
        """Squared energy of the leading ``k`` directions of each module, float64 [M] (``0 <= k <= rank``)."""
        bounds = np.stack((self.offsets[:-1], self.offsets[:-1] + k), axis=1).ravel()
        # the appended zero lets the last bound point at the end; of no directions, reduceat gives the first
        sums: Floats = np.add.reduceat(np.append(np.square(self.sigma), 0.0), bounds)[::2]
        return np.where(k > 0, sums, 0.0)

    def adapter_energy(self, k: Ints) -> Floats:
        """Squared energy that ranks ``k`` (int64 [M]) retain of each adapter, float64 [adapters]."""
        return self.by_adapter(self.module_energy(k))

    def energy(self, k: Ints) -> float:
        """Squared energy of the fleet that ranks ``k`` (int64 [M]) retain."""
        return float(self.module_energy(k).sum())

    def retained_energy(self, k: Ints) -> float:
        """Share of the fleet's squared energy that ranks ``k`` retain; 1 for a fleet of zeros."""
        total = self.energy(self.rank)
        return min(1.0, self.energy(k) / total) if total > 0 else 1.0
