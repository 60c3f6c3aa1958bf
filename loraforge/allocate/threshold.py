"""Rules with one threshold: keep every direction whose score reaches it. PARA, and what LoRA resize tools offer.

Each rule is a score, float64 [sum of rank], that never rises within a module; the threshold is the lowest whose
ranks fit the budget, so that rules are compared at equal budgets. Directions of equal score stand or fall together.
None of them knows what a direction costs. One direction a module is always kept.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from loraforge.allocate.problem import Floats, Ints, Problem

Score = Callable[[Problem], Floats]


def magnitude(problem: Problem) -> Floats:
    """The singular value itself: one threshold on sigma over all modules (PARA)."""
    return problem.sigma


def position(problem: Problem) -> Floats:
    """Minus the place in the spectrum: one fixed rank for all modules, as far as they have it."""
    return -problem.place.astype(np.float64)


def ratio(problem: Problem) -> Floats:
    """sigma_j / sigma_1 (``sv_ratio``): keep what is not that much smaller than the module's largest."""
    first = np.repeat(problem.sigma[problem.offsets[:-1]], problem.rank)
    return np.divide(problem.sigma, first, where=first > 0, out=np.zeros_like(first))


def cumulative(problem: Problem) -> Floats:
    """Share of the sum of singular values not yet kept before j (``sv_cumulative``): go on until a share is reached."""
    return _rest(problem, problem.sigma)


def frobenius(problem: Problem) -> Floats:
    """Share of squared energy not yet kept before j (``sv_fro``; section 2's tau rule for every module)."""
    return _rest(problem, np.square(problem.sigma))


def threshold(problem: Problem, score: Score, ceiling: int) -> Ints:
    """Ranks, int64 [M], of the lowest threshold on ``score`` that costs at most ``ceiling`` parameters.

    Raises ValueError where one direction a module costs more.
    """
    slack = ceiling - int(problem.cost.sum())
    if slack < 0:
        raise ValueError("one direction a module must fit the ceiling")
    module = np.repeat(np.arange(len(problem.names)), problem.rank)
    free = problem.place > 1
    module, values = module[free], score(problem)[free]
    order = np.argsort(-values, kind="stable")
    spent = np.cumsum(problem.cost[module[order]])
    last_of_equals = np.append(np.diff(values[order]) != 0, True)[: len(order)]
    fits = np.flatnonzero(last_of_equals & (spent <= slack))
    kept = module[order[: fits[-1] + 1]] if len(fits) else module[:0]
    return 1 + np.bincount(kept, minlength=len(problem.names))


def threshold_by_adapter(problem: Problem, score: Score, uniform: Ints) -> Ints:
    """:func:`threshold` for each adapter alone, under what its ranks ``uniform`` (int64 [M]) cost."""
    found = np.ones_like(problem.rank)
    for index, alone in problem.members():
        found[index] = threshold(alone, score, alone.parameters(uniform[index]))
    return found


def _rest(problem: Problem, values: Floats) -> Floats:
    """1 before the first value of a module, less its share after each; 0 for a module of zeros."""
    table = np.zeros((len(problem.names), int(problem.rank.max())))
    real = np.arange(table.shape[1]) < problem.rank[:, None]
    table[real] = values
    total = table.sum(axis=1, keepdims=True)
    # sums from the end keep the order of the smallest terms, which differences from the front would round away
    rest = np.cumsum(table[:, ::-1], axis=1)[:, ::-1]
    shares: Floats = np.divide(rest, total, where=total > 0, out=np.zeros_like(rest))[real]
    return shares
