"""The fair policy: raise the retained share of the adapter that is worst off, and of the next, until nothing fits.

Maximise ``min_a e_a`` with e_a the share of adapter a's squared energy that is kept. A level t costs every adapter
the shortest prefix of its directions, densest first, that reaches t; the total only rises with t, and only at the
shares that such prefixes have, so that a binary search over these finds the highest level that fits. It is the
optimum where an adapter's directions cost the same, and off by less than one direction an adapter where they do not.
What is left over goes where it adds most to a retained share.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loraforge.allocate.objectives import adapter_relative, weighed
from loraforge.allocate.problem import Floats, Ints, Problem
from loraforge.allocate.spectral import candidates, spectral


@dataclass(frozen=True)
class _Ladder:
    """One adapter's directions above the floor, densest first: their modules, and the share and cost after each."""

    modules: Ints
    share: Floats
    cost: Ints

    def reach(self, level: float) -> int:
        """How many directions reach ``level``; all where none does."""
        return min(int(np.searchsorted(self.share, level)), len(self.modules))


def fair(problem: Problem, ceiling: int, floor: Ints, cap: Ints) -> Ints:
    """Ranks, int64 [M], from ``floor`` up to ``cap`` (int64 [M]) whose worst retained share is highest.

    Raises ValueError where the floor exceeds the ceiling.
    """
    slack = ceiling - problem.parameters(floor)
    if slack < 0:
        raise ValueError("the rank floor must fit the ceiling")
    ladders = [_ladder(index, alone, floor[index], cap[index]) for index, alone in problem.members()]
    levels = np.unique(np.concatenate([ladder.share for ladder in ladders]))

    def cost(level: float) -> int:
        return sum(int(ladder.cost[ladder.reach(level)]) for ladder in ladders)

    low, high = 0, len(levels)  # level[low] fits (the floor does), level[high] does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(float(levels[middle])) <= slack else (low, middle)
    k = floor.copy()
    for ladder in ladders:
        np.add.at(k, ladder.modules[: ladder.reach(float(levels[low]))], 1)
    return spectral(weighed(problem, adapter_relative), ceiling, k, cap=cap).k


def _ladder(index: Ints, alone: Problem, floor: Ints, cap: Ints) -> _Ladder:
    module, density, cost = candidates(alone, floor, cap)
    order = np.argsort(-density, kind="stable")
    energy, whole = alone.energy(floor), alone.energy(alone.rank)
    share = np.concatenate(([energy], energy + np.cumsum((density * cost)[order])))
    return _Ladder(
        index[module[order]],
        share / whole if whole > 0 else np.ones_like(share),
        np.concatenate(([0], np.cumsum(cost[order]))),
    )
