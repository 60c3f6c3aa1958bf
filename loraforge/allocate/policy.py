"""One policy at one budget: what the command line, ``compress`` and the experiments call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from loraforge.allocate.budget import Budget, Ceiling, ceiling
from loraforge.allocate.problem import Floats, Ints, Problem
from loraforge.allocate.spectral import half_uniform_floor, spectral
from loraforge.config import Policy
from loraforge.errors import BudgetError
from loraforge.progress import Timer

# Rank floors by policy, as the allocation file states them; u is the uniform rank.
FLOORS: dict[Policy, str] = {
    "uniform": "u",
    "spectral": "max(1, ceil(u / 2))",
    "spectral-nofloor": "1",
}


class ModuleShape(Protocol):
    """What the factor cache states of a module."""

    @property
    def rank(self) -> int: ...
    @property
    def d_in(self) -> int: ...
    @property
    def d_out(self) -> int: ...


class Spectra(Protocol):
    """An adapter with known spectra; the factor cache's ``CachedAdapter`` is one."""

    @property
    def adapter(self) -> str: ...
    @property
    def modules(self) -> Mapping[str, ModuleShape]: ...
    def spectrum(self, name: str) -> Floats: ...


@dataclass(frozen=True)
class Allocation:
    """Retained ranks of a fleet.

    Parameters
    ----------
    policy, budget, ceiling: what was asked for, and what it means for this fleet.
    k: int64 [M], retained ranks, in the order of the problem.
    spent, slack: compact parameters used, and left of the ceiling.
    gap: bound on the energy that any choice above the same floor could add; for the uniform policy, any
        choice above the spectral policy's floor.
    retained_energy: share of the fleet's absolute squared energy that is kept.
    seconds: wall time of the choice itself.
    """

    policy: Policy
    budget: Budget
    ceiling: Ceiling
    k: Ints
    spent: int
    slack: int
    gap: float
    retained_energy: float
    seconds: float


def problem_of(fleet: Iterable[Spectra]) -> Problem:
    """Gather the modules and spectra of a factorised fleet."""
    names: list[tuple[str, str]] = []
    shapes: list[tuple[int, int]] = []
    spectra: list[Floats] = []
    for adapter in fleet:
        for name, module in adapter.modules.items():
            names.append((adapter.adapter, name))
            shapes.append((module.rank, module.d_in + module.d_out))
            spectra.append(adapter.spectrum(name))
    rank, cost = np.array(shapes, dtype=np.int64).T
    return Problem(names, rank, cost, np.concatenate(spectra).astype(np.float64))


def allocate(
    problem: Problem,
    policy: Policy,
    budget: Budget,
    *,
    bytes_per_parameter: int = 2,
    k_max: int | None = None,
) -> Allocation:
    """Choose ranks by ``policy`` under ``budget``; ``k_max`` caps every rank of the spectral policies.

    Raises BudgetError as :func:`loraforge.allocate.budget.ceiling` does, and for a ``k_max`` below 1.
    """
    if k_max is not None and k_max < 1:
        raise BudgetError(f"{k_max} is not a rank", key="--k-max", remedy="pass a positive number")
    with Timer() as timer:
        limit = ceiling(budget, problem.rank, problem.cost, bytes_per_parameter=bytes_per_parameter)
        floor = (
            np.ones_like(problem.rank) if policy == "spectral-nofloor" else half_uniform_floor(limit.uniform)
        )
        chosen = spectral(problem, limit.params, floor, k_max=None if policy == "uniform" else k_max)
        k = limit.uniform if policy == "uniform" else chosen.k
    spent = problem.parameters(k)
    return Allocation(
        policy=policy,
        budget=budget,
        ceiling=limit,
        k=k,
        spent=spent,
        slack=limit.params - spent,
        gap=chosen.gap
        if k is chosen.k
        else max(0.0, problem.energy(chosen.k) + chosen.gap - problem.energy(k)),
        retained_energy=problem.retained_energy(k),
        seconds=timer.s,
    )


def allocation_records(problem: Problem, allocation: Allocation) -> list[dict[str, Any]]:
    """Records of target ``allocation``: one a module, with the squared energy it keeps, and one of totals."""
    arm = {"policy": allocation.policy, "budget": allocation.budget.value}
    energy = problem.module_energy(allocation.k)
    found: list[dict[str, Any]] = []
    for index, (adapter, module) in enumerate(problem.names):
        found.append(
            {
                "adapter": adapter,
                "module": module,
                "kind": module.rpartition(".")[2],
                "layer": next((int(part) for part in module.split(".") if part.isdigit()), 0),
                **arm,
                "rank": int(problem.rank[index]),
                "k": int(allocation.k[index]),
                "cost": int(problem.cost[index]),
                "energy": float(energy[index]),
            }
        )
    totals = {
        "record": "allocation",
        **arm,
        "spent": allocation.spent,
        "ceiling": allocation.ceiling.params,
        "slack": allocation.slack,
        "gap": allocation.gap,
        "seconds": allocation.seconds,
    }
    return [*found, totals]
