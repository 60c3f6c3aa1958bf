"""The spectral policy: spend a shared budget on the directions of most energy per parameter.

Maximise the sum of (s_m sigma_mj)^2 over kept directions subject to l_m <= k_m <= min(r_m, k_max) and
sum of k_m c_m <= ceiling (section 4.2 of the paper). The energy is absolute: modules are not normalised.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loraforge.allocate.problem import Floats, Ints, Problem

Modules = NDArray[np.int32]
_BUCKET_SHIFT = 48  # keep the exponent and four bits of the fraction: 16 buckets an octave


@dataclass(frozen=True)
class Selection:
    """Ranks that the greedy rule chose.

    Parameters
    ----------
    k: int64 [M], retained ranks.
    spent, slack: compact parameters used, and left of the ceiling.
    first_rejected_density: energy per parameter of the first direction that did not fit; 0 where all did.
    gap: an upper bound on the energy that any other choice under the same floor could add.
    """

    k: Ints
    spent: int
    slack: int
    first_rejected_density: float
    gap: float


def half_uniform_floor(uniform: Ints) -> Ints:
    """The rank floor ``max(1, ceil(u_m / 2))``, int64 [M]."""
    return np.maximum(1, (uniform + 1) // 2)


def spectral(problem: Problem, ceiling: int, floor: Ints, *, cap: Ints | int | None = None) -> Selection:
    """Fill ``ceiling`` parameters greedily, from ranks ``floor`` (int64 [M]) up to ranks ``cap`` (all, or int64 [M]).

    The rule: take the remaining direction of the largest energy per parameter that still fits, ties going to
    the lower module, then the lower direction; go on until none fits. A stable sort gives the order. Slack
    only falls and costs are constant within a module, so a direction that does not fit bars all that cost as
    much, its own module's others among them: take a prefix by a cumulative sum, filter, and go on; there are at
    most as many passes as distinct costs.

    The gap. The linear relaxation takes everything before the first rejected direction and spends the slack of
    that moment, not of the end, at its density. Later picks count against it. So
    ``gap = slack_then * first_rejected_density - energy of later picks`` bounds the optimum's lead. (The final
    slack times that density would be no bound: later picks may be much less dense.)

    Raises ValueError where the floor exceeds a nominal rank or the ceiling.
    """
    cap = problem.rank if cap is None else np.minimum(problem.rank, cap)
    start = np.minimum(floor, cap)
    slack = ceiling - problem.parameters(start)
    if start.min() < 0 or (floor > problem.rank).any() or slack < 0:
        raise ValueError("the rank floor must lie between 0 and the nominal ranks, and fit the ceiling")

    purse = _Purse(slack)
    purse.fill(*candidates(problem, start, np.where(problem.cost <= slack, cap, start)))
    k = start + np.bincount(np.concatenate(purse.taken), minlength=len(start))
    return Selection(k, ceiling - purse.slack, purse.slack, purse.rejected or 0.0, max(0.0, purse.gap))


def candidates(problem: Problem, start: Ints, stop: Ints) -> tuple[Modules, Floats, Ints]:
    """Module, density and cost of directions ``start[m] <= j < stop[m]``, module after module."""
    count = stop - start
    module = np.repeat(np.arange(len(count), dtype=np.int32), count)
    first = problem.offsets[:-1] + start
    where = np.repeat(first - (np.cumsum(count) - count), count) + np.arange(len(module))
    cost = problem.cost[module]
    return module, np.square(problem.sigma[where]) / cost, cost


class _Purse:
    """Slack, the modules whose next direction it bought, and the bound on what another choice could add."""

    def __init__(self, slack: int) -> None:
        self.slack = slack
        self.taken: list[Modules] = [np.empty(0, dtype=np.int32)]
        self.rejected: float | None = None
        self.gap = 0.0

    def fill(self, module: Modules, density: Floats, cost: Ints) -> None:
        """Buy by the rule from candidates in module order, each affordable by itself.

        Only what lies near the edge of the slack is sorted: candidates go into buckets by the leading bits of
        their density, buckets that fit as a whole are taken as a whole. Each pass rejects at least one cost.
        """
        while len(module):
            bucket = density.view(np.int64) >> _BUCKET_SHIFT  # non-negative floats order as their bits do
            running = np.cumsum(np.bincount(bucket, weights=cost)[::-1])
            edge = len(running) - 1 - int(np.searchsorted(running, self.slack, side="right"))
            whole = np.flatnonzero(bucket > edge)
            self._take(module[whole], density[whole], cost[whole])
            near = np.flatnonzero(bucket == edge)
            self._fill_sorted(module[near], density[near], cost[near])
            far = np.flatnonzero((bucket < edge) & (cost <= self.slack))
            module, density, cost = module[far], density[far], cost[far]

    def _fill_sorted(self, module: Modules, density: Floats, cost: Ints) -> None:
        order = np.argsort(-density, kind="stable")
        while len(order):
            module, density, cost = module[order], density[order], cost[order]
            fit = int(np.searchsorted(np.cumsum(cost), self.slack, side="right"))
            self._take(module[:fit], density[:fit], cost[:fit])
            if fit < len(cost) and self.rejected is None:
                self.rejected = float(density[fit])
                self.gap = self.slack * self.rejected
            order = fit + np.flatnonzero(cost[fit:] <= self.slack)

    def _take(self, module: Modules, density: Floats, cost: Ints) -> None:
        self.taken.append(module)
        self.slack -= int(cost.sum())
        if self.rejected is not None:
            self.gap -= float(density @ cost)
