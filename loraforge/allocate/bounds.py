"""Least and most that one adapter may have of a shared budget, as ranks that no choice goes below or above."""

from __future__ import annotations

from fractions import Fraction

from loraforge.allocate.problem import Ints, Problem
from loraforge.allocate.spectral import spectral
from loraforge.errors import BudgetError


def least_ranks(problem: Problem, uniform: Ints, floor: Ints, share: Fraction) -> Ints:
    """Ranks, int64 [M], that cost each adapter about ``share`` of its uniform cost, its densest directions first.

    ``uniform`` and ``floor`` are int64 [M]; nothing falls below ``floor``, and no adapter costs more than its
    uniform ranks do as long as the floor does not. Raises BudgetError unless 0 <= share <= 1.
    """
    if not 0 <= share <= 1:
        raise BudgetError(
            f"{share} is not from 0 to 1",
            key="--adapter-floor",
            remedy="state a share of an adapter's uniform cost",
        )
    return _ranks(problem, uniform, floor, share)


def most_ranks(problem: Problem, uniform: Ints, floor: Ints, share: Fraction) -> Ints:
    """Ranks, int64 [M], beyond which an adapter would cost more than ``share`` times its uniform cost.

    Raises BudgetError for a share below 1: the budget could then not be spent.
    """
    if share < 1:
        raise BudgetError(
            f"{share} is below 1",
            key="--adapter-ceiling",
            remedy="state a multiple of an adapter's uniform cost",
        )
    return _ranks(problem, uniform, floor, share)


def _ranks(problem: Problem, uniform: Ints, floor: Ints, share: Fraction) -> Ints:
    found = floor.copy()
    for index, alone in problem.members():
        start = floor[index]
        purse = max(int(share * alone.parameters(uniform[index])), alone.parameters(start))
        found[index] = spectral(alone, purse, start).k
    return found
