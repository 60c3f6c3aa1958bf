"""What retained ranks cost besides parameters, and the greedy rule for costs that are not linear in rank.

A cost model gives the cost of rank 1, 2, ..., r of every module, float64 [sum of rank], non-decreasing within a
module: bytes after rounding ranks up to what a kernel or a pool takes, or measured microseconds. The budget stays one
of parameters and always holds; the model adds a second ceiling, what the uniform ranks of that budget cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from loraforge.allocate.problem import Floats, Ints, Problem
from loraforge.errors import InputError, UsageError
from loraforge.files import read_json

CostModel = Callable[[Problem], Floats]


def bucketed_bytes(buckets: Sequence[int], bytes_per_parameter: int) -> CostModel:
    """Bytes of factors whose ranks are padded up to the next of ``buckets``; beyond the last, to its multiples.

    Raises UsageError unless ``buckets`` are positive and rising.
    """
    steps = np.array(buckets, dtype=np.int64)
    if not len(steps) or steps[0] < 1 or (np.diff(steps) <= 0).any():
        raise UsageError(
            f"{list(buckets)} are no buckets", key="--buckets", remedy="write rising ranks, as 8,16,32"
        )
    top = int(steps[-1])

    def cost(problem: Problem) -> Floats:
        rank = problem.place
        inside = steps[np.minimum(np.searchsorted(steps, rank), len(steps) - 1)]
        padded = np.where(rank <= top, inside, -(-rank // top) * top)
        return padded * np.repeat(problem.cost, problem.rank) * float(bytes_per_parameter)

    return cost


def microseconds(table: Mapping[str, Mapping[int, float]]) -> CostModel:
    """Measured times by kind of module (``q_proj``) and rank, linear between measured ranks and flat outside them.

    A time that falls with rank is measurement noise and counts as the larger one before it. Calling the model raises
    InputError for a kind that ``table`` lacks.
    """

    def cost(problem: Problem) -> Floats:
        parts = []
        for (_, module), rank in zip(problem.names, problem.rank.tolist(), strict=True):
            kind = module.rpartition(".")[2]
            if kind not in table:
                raise InputError(
                    "no times of this kind of module", key=kind, remedy="measure it, or name its times"
                )
            at = sorted(table[kind])
            times = np.maximum.accumulate([table[kind][r] for r in at])
            parts.append(np.interp(np.arange(1, rank + 1), at, times))
        return np.concatenate(parts)

    return cost


def load_microseconds(path: Path) -> CostModel:
    """:func:`microseconds` of a JSON file ``{"q_proj": {"8": 1.9, "16": 2.3}, ...}``. Raises InputError."""
    value = read_json(path)
    try:
        table = {kind: {int(r): float(us) for r, us in times.items()} for kind, times in value.items()}
        usable = all(
            times and all(r > 0 and 0 < us < np.inf for r, us in times.items()) for times in table.values()
        )
    except (AttributeError, TypeError, ValueError):
        usable = False
    if not usable or not table:
        raise InputError(
            "not a table of times",
            path=path,
            remedy='write {"q_proj": {"8": 1.9, "16": 2.3}}, in microseconds',
        )
    return microseconds(table)


def select_by_cost(
    problem: Problem, reach: Floats, limit: float, ceiling: int, floor: Ints, cap: Ints
) -> Ints:
    """Ranks, int64 [M], of most energy under two ceilings, from ``floor`` up to ``cap`` (int64 [M]).

    A step may hold many directions: ranks of one bucket cost the same. So each module offers the corners of the upper
    concave hull of its energy over cost; the densest steps are taken as long as both ceilings hold, a module whose
    step does not fit waits, and hulls are drawn again from where each module stands until no step fits.

    Parameters
    ----------
    problem: its spectra hold the energy that counts.
    reach: float64 [sum of rank], cost of rank 1, 2, ... of each module, non-decreasing.
    limit: most that ``reach`` may add up to. ceiling: most parameters.

    Raises ValueError where the floor exceeds either ceiling.
    """
    k = floor.copy()
    first = problem.offsets[:-1]
    slack = ceiling - problem.parameters(k)
    rest = limit - float(reached(problem, reach, k).sum())
    if slack < 0 or rest < -1e-9 * abs(limit):
        raise ValueError("the rank floor must fit both ceilings")
    # of no direction first: a module may start from none
    energy, costs = (_from_none(problem, values) for values in (np.square(problem.sigma), reach))
    first = first + np.arange(len(first))
    while True:
        steps = []
        for m in np.flatnonzero((k < cap) & (problem.cost <= slack)).tolist():
            stop = min(int(cap[m]), int(k[m]) + slack // int(problem.cost[m]))
            here = slice(first[m] + k[m], first[m] + stop + 1)
            steps += [(-density, m, to) for density, to in _hull(energy[here], costs[here], int(k[m]), rest)]
        waits: set[int] = set()
        taken = 0
        for _, m, to in sorted(steps):
            parameters = (to - int(k[m])) * int(problem.cost[m])
            extra = float(costs[first[m] + to] - costs[first[m] + k[m]])
            if m in waits or parameters > slack or extra > rest:
                waits.add(m)
                continue
            k[m], slack, rest, taken = to, slack - parameters, rest - extra, taken + 1
        if not taken:
            return k


def reached(problem: Problem, reach: Floats, k: Ints) -> Floats:
    """What ranks ``k`` (int64 [M], 0 and up) cost by ``reach``, float64 [M]."""
    return np.where(k > 0, reach[problem.offsets[:-1] + np.maximum(k, 1) - 1], 0.0)


def _from_none(problem: Problem, values: Floats) -> Floats:
    """``values`` of ranks 1, 2, ... of each module with a 0 for rank 0 before them, float64 [sum of rank + M]."""
    return np.insert(values, problem.offsets[:-1], 0.0)


def _hull(energy: Floats, reach: Floats, start: int, rest: float) -> list[tuple[float, int]]:
    """(density, rank) of the concave hull's steps from rank ``start``, densest first, as far as ``rest`` goes.

    ``energy`` and ``reach`` are of ranks start, start + 1, ...; a step without cost is infinitely dense.
    """
    gained = np.cumsum(energy) - energy[0]
    spent = reach - reach[0]
    corners = [0]
    for j in range(1, int(np.searchsorted(spent, rest, side="right"))):
        # a corner goes where the step to it is no denser than the step from it
        while len(corners) > 1 and _density(gained, spent, corners[-2], corners[-1]) <= _density(
            gained, spent, corners[-1], j
        ):
            corners.pop()
        corners.append(j)
    return [(_density(gained, spent, i, j), start + j) for i, j in pairwise(corners)]


def _density(gained: Floats, spent: Floats, i: int, j: int) -> float:
    cost = float(spent[j] - spent[i])
    return float(gained[j] - gained[i]) / cost if cost > 0 else np.inf
