"""The uniform policy: every module keeps the same share of its nominal rank."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from loraforge.allocate.problem import Ints


def uniform(rank: Ints, fraction: Fraction) -> Ints:
    """``max(1, floor(r_m * fraction))`` for each module, int64 [M] (section 4.2 of the paper).

    The floor is exact: it is taken of integers, once for each distinct rank.
    """
    distinct, where = np.unique(rank, return_inverse=True)
    kept = [max(1, int(r) * fraction.numerator // fraction.denominator) for r in distinct]
    return np.array(kept, dtype=np.int64)[where]


def largest_fraction(rank: Ints, cost: Ints, ceiling: int) -> Fraction | None:
    """Largest fraction in (0, 1] whose uniform ranks cost at most ``ceiling`` parameters, or None.

    Uniform cost steps up only at j / r for a nominal rank r, so these breakpoints hold the optimum; all are
    tried at once. None means that rank 1 everywhere costs too much.
    """
    distinct, where = np.unique(rank, return_inverse=True)
    weight = np.zeros(len(distinct), dtype=np.int64)
    np.add.at(weight, where, cost)
    numerator = np.concatenate([np.arange(1, r + 1) for r in distinct])
    denominator = np.repeat(distinct, distinct)
    kept = np.maximum(1, distinct * numerator[:, None] // denominator[:, None])
    fits = np.flatnonzero(kept @ weight <= ceiling)
    return max((Fraction(int(numerator[i]), int(denominator[i])) for i in fits), default=None)
