"""One policy at one budget: what the command line, ``compress`` and the experiments call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import numpy as np

from loraforge.allocate.bounds import least_ranks, most_ranks
from loraforge.allocate.budget import Budget, Ceiling, ceiling
from loraforge.allocate.costs import reached, select_by_cost
from loraforge.allocate.fair import fair
from loraforge.allocate.fused import fuse
from loraforge.allocate.objectives import traffic_weighted, weighed
from loraforge.allocate.options import DEFAULTS, Options
from loraforge.allocate.policies import FREE, HALF, RULES, Cut, Fair, Greedy, Rule, Uniform
from loraforge.allocate.problem import Floats, Ints, Problem
from loraforge.allocate.spectral import half_uniform_floor, spectral
from loraforge.allocate.threshold import threshold, threshold_by_adapter
from loraforge.config import Policy
from loraforge.errors import BudgetError, UsageError
from loraforge.progress import Timer

# Rank floors by policy, as the allocation file states them; u is the uniform rank.
FLOORS: dict[Policy, str] = {name: rule.floor for name, rule in RULES.items()}


class ModuleShape(Protocol):
    """What the factor cache states of a module."""

    @property
    def rank(self) -> int: ...
    @property
    def d_in(self) -> int: ...
    @property
    def d_out(self) -> int: ...


@runtime_checkable
class Table(Protocol):
    """Modules in columns: names, int64 [M] rank and cost of one direction, float64 [sum of rank] spectra one after the
    other. The factor cache's modules come so, which spares a fleet of a thousand adapters 252,000 calls."""

    @property
    def names(self) -> Sequence[str]: ...
    @property
    def rank(self) -> Ints: ...
    @property
    def cost(self) -> Ints: ...
    @property
    def sigma(self) -> Floats: ...


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
    gap: bound on what any choice above the same floor could add to the policy's objective, in its unit; for
        policies without such a sum, to the absolute energy (for ``uniform``, above the spectral policy's floor).
    retained_energy: share of the fleet's absolute squared energy that is kept, in the norm of the spectra.
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
    rank: list[Ints] = []
    cost: list[Ints] = []
    spectra: list[Floats] = []
    for adapter in fleet:
        modules = adapter.modules
        names += [(adapter.adapter, name) for name in modules]
        if isinstance(modules, Table):
            rank.append(modules.rank)
            cost.append(modules.cost)
            spectra.append(modules.sigma)
            continue
        rank.append(np.array([module.rank for module in modules.values()], dtype=np.int64))
        cost.append(np.array([module.d_in + module.d_out for module in modules.values()], dtype=np.int64))
        spectra += [adapter.spectrum(name) for name in modules]
    return Problem(
        names, np.concatenate(rank), np.concatenate(cost), np.concatenate(spectra).astype(np.float64)
    )


def allocate(
    problem: Problem,
    policy: Policy,
    budget: Budget,
    *,
    bytes_per_parameter: int = 2,
    options: Options = DEFAULTS,
) -> Allocation:
    """Choose ranks by ``policy`` under ``budget``; the norm is that of the problem's spectra.

    Raises BudgetError as :func:`loraforge.allocate.budget.ceiling` does and for options out of range, UsageError for
    an option that ``policy`` does not know, InputError for traffic or costs that do not fit the fleet.
    """
    rule = RULES[policy]
    _check(policy, rule, options)
    with Timer() as timer:
        limit = ceiling(budget, problem.rank, problem.cost, bytes_per_parameter=bytes_per_parameter)
        k, gap = _choose(problem, rule, limit, options)
    spent = problem.parameters(k)
    return Allocation(
        policy=policy,
        budget=budget,
        ceiling=limit,
        k=k,
        spent=spent,
        slack=limit.params - spent,
        gap=gap,
        retained_energy=problem.retained_energy(k),
        seconds=timer.s,
    )


def _check(policy: Policy, rule: Rule, options: Options) -> None:
    if options.k_max is not None and options.k_max < 1:
        raise BudgetError(f"{options.k_max} is not a rank", key="--k-max", remedy="pass a positive number")
    given = [field.name for field in fields(options) if getattr(options, field.name) not in (None, False)]
    if isinstance(rule.choose, Uniform | Cut):
        refused = given
    elif isinstance(rule.choose, Fair):
        refused = [name for name in given if name in ("traffic", "fused", "cost")]
    else:
        refused = []
    if refused:
        option = "--" + refused[0].replace("_", "-")
        raise UsageError(
            f"the {policy} policy does not take this option",
            key=option,
            remedy="leave it out, or choose spectral or another policy that maximises a sum",
        )


def _choose(problem: Problem, rule: Rule, limit: Ceiling, options: Options) -> tuple[Ints, float]:
    """Ranks, int64 [M], and a bound on what another choice could add."""
    ones = np.ones_like(problem.rank)
    match rule.choose:
        case Uniform():
            k = limit.uniform
            return k, _gap(problem, limit.params, half_uniform_floor(k), problem.rank, k)
        case Cut(score, each_adapter):
            k = (
                threshold_by_adapter(problem, score, limit.uniform)
                if each_adapter
                else threshold(problem, score, limit.params)
            )
            return k, _gap(problem, limit.params, ones, problem.rank, k)
        case Fair():
            floor, cap = _bounds(problem, rule, limit.uniform, options)
            k = fair(problem, limit.params, floor, cap)
            return k, _gap(problem, limit.params, floor, cap, k)
        case Greedy(objective):
            if options.traffic is not None:
                objective = traffic_weighted(objective, options.traffic)
            return _greedy(problem, weighed(problem, objective), rule, limit, options)


def _greedy(
    problem: Problem, weighed_: Problem, rule: Rule, limit: Ceiling, options: Options
) -> tuple[Ints, float]:
    fused = fuse(weighed_) if options.fused else None
    target = weighed_ if fused is None else fused.problem
    uniform_ = limit.uniform if fused is None else fused.gather(limit.uniform)
    floor, cap = _bounds(target, rule, uniform_, options)
    if options.cost is None:
        chosen = spectral(target, limit.params, floor, cap=cap)
        k, gap = chosen.k, chosen.gap
    else:
        reach = options.cost(problem)
        reach = reach if fused is None else fused.add(reach)
        k = _under_both(target, reach, limit.params, uniform_, floor, cap)
        gap = _gap(target, limit.params, floor, cap, k)
    return (k if fused is None else fused.expand(k)), gap


def _under_both(problem: Problem, reach: Floats, params: int, uniform_: Ints, floor: Ints, cap: Ints) -> Ints:
    most, least = (float(reached(problem, reach, ranks).sum()) for ranks in (uniform_, floor))
    if least > most:
        raise BudgetError(
            f"the floors of adapters cost {least:g} as --cost counts, the uniform ranks {most:g}",
            key="--adapter-floor",
            remedy="lower it",
        )
    return select_by_cost(problem, reach, most, params, floor, cap)


def _bounds(problem: Problem, rule: Rule, uniform_: Ints, options: Options) -> tuple[Ints, Ints]:
    """Floor and cap of every rank, int64 [M] each, floor <= cap."""
    cap = problem.rank if options.k_max is None else np.minimum(problem.rank, options.k_max)
    floor = _floor(problem, rule, uniform_)
    if options.adapter_ceiling is not None:
        cap = np.minimum(cap, most_ranks(problem, uniform_, floor, options.adapter_ceiling))
    if options.adapter_floor is not None:
        floor = least_ranks(problem, uniform_, floor, options.adapter_floor)
    return np.minimum(floor, cap), cap


def _floor(problem: Problem, rule: Rule, uniform_: Ints) -> Ints:
    if rule.floor == HALF:
        return half_uniform_floor(uniform_)
    if rule.floor != FREE:
        return np.ones_like(problem.rank)
    floor = np.zeros_like(problem.rank)
    density = np.square(problem.sigma[problem.offsets[:-1]]) / problem.cost
    for number in range(len(problem.adapters)):
        index = np.flatnonzero(problem.owner == number)
        floor[index[np.argmax(density[index])]] = 1
    return floor


def _gap(problem: Problem, params: int, floor: Ints, cap: Ints, k: Ints) -> float:
    """Most energy that a choice between ``floor`` and ``cap`` could add to that of ``k``."""
    best = spectral(problem, params, floor, cap=cap)
    return max(0.0, problem.energy(best.k) + best.gap - problem.energy(k))


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
