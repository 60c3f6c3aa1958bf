"""What a good choice of ranks is: functions that weigh the squared energy of every module of a fleet.

Every separable objective here is ``sum_m w_m sum_{j <= k_m} sigma_mj^2``: concave in the ranks, so that the greedy
rule of :mod:`loraforge.allocate.spectral` is optimal but for the last direction. An objective maps a
:class:`~loraforge.allocate.problem.Problem` to the weights w, float64 [M]; those below compose. Which norm sigma
measures (of weights, or of what they do to activations) is the problem's business, not the objective's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from loraforge.allocate.problem import Floats, Problem
from loraforge.errors import InputError

Objective = Callable[[Problem], Floats]


def absolute(problem: Problem) -> Floats:
    """``w_m = 1``: squared energy as it is (section 4.2 of the paper). Adapters of large norm take what they want."""
    return np.ones(len(problem.names))


def module_relative(problem: Problem) -> Floats:
    """``w_m = 1 / E_m`` with ``E_m = sum_j sigma_mj^2``: every module's retained share counts the same."""
    return _inverse(problem.module_energy(problem.rank))


def adapter_relative(problem: Problem) -> Floats:
    """``w_m = 1 / E_a`` with E_a the energy of m's adapter: every adapter's retained share counts the same."""
    return _inverse(problem.adapter_energy(problem.rank))[problem.owner]


def tempered(objective: Objective, power: float) -> Objective:
    """``w_m = v_m^power`` for the weights v of ``objective``: 0 is absolute energy, 1 is ``objective`` itself."""

    def weights(problem: Problem) -> Floats:
        found = objective(problem)
        return np.power(found, power, where=found > 0, out=_zeros(problem))

    return weights


def blend(parts: Mapping[Objective, float]) -> Objective:
    """``w = sum_i share_i v_i / V_i``, V_i being all energy as v_i weighs it: shares of objectives in one unit."""

    def weights(problem: Problem) -> Floats:
        energy = problem.module_energy(problem.rank)
        total = _zeros(problem)
        for objective, share in parts.items():
            found = objective(problem)
            whole = float(found @ energy)
            total += share * found / whole if whole > 0 else 0.0
        return total

    return weights


def traffic_weighted(objective: Objective, traffic: Mapping[str, float]) -> Objective:
    """``w_m = t_a v_m``: the weights v of ``objective`` by the share t of requests that m's adapter serves.

    Calling it raises InputError for an adapter of the problem that ``traffic`` does not name, or one it does not have.
    """

    def weights(problem: Problem) -> Floats:
        if odd := sorted(traffic.keys() ^ set(problem.adapters)):
            raise InputError(
                "fleet and traffic differ in this adapter",
                key=odd[0],
                remedy="state a share for every adapter of the fleet, and no other",
            )
        shares: Floats = np.array([traffic[name] for name in problem.adapters])[problem.owner]
        return objective(problem) * shares

    return weights


def weighed(problem: Problem, objective: Objective) -> Problem:
    """The same modules with spectra whose absolute energy is ``objective``'s: sigma_mj * sqrt(w_m)."""
    root = np.sqrt(objective(problem))
    return replace(problem, sigma=problem.sigma * np.repeat(root, problem.rank))


def _inverse(energy: Floats) -> Floats:
    """1 / energy; 0 where there is none to keep, or so little that its inverse is not finite."""
    found = np.zeros_like(energy)
    np.divide(1.0, energy, where=energy >= np.finfo(np.float64).tiny, out=found)
    return found


def _zeros(problem: Problem) -> Floats:
    return np.zeros(len(problem.names))
