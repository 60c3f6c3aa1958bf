"""The numbers by adapter that the command, its JSON and its report tell alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from loraforge.allocate.allocation import AllocationFile
from loraforge.allocate.problem import Ints, Problem
from loraforge.config import Layout


@dataclass(frozen=True)
class AdapterNumbers:
    """One adapter under a choice of ranks.

    Parameters
    ----------
    modules: how many it has.
    rank: its largest nominal rank.
    least, median, most: of its retained ranks.
    before, after, uniform: parameters of all directions, of those that are kept, of uniform ranks at this budget.
    share, uniform_share: of the fleet's kept, and of its uniform parameters.
    energy: share of its squared singular values that is kept, 1 for an update of zeros.
    """

    name: str
    modules: int
    rank: int
    least: int
    median: float
    most: int
    before: int
    after: int
    uniform: int
    share: float
    uniform_share: float
    energy: float

    @property
    def ratio(self) -> float:
        """Its share of the budget over that of uniform ranks."""
        return self.share / self.uniform_share


def ranks_of(problem: Problem, allocation: AllocationFile) -> Ints:
    """Retained ranks, int64 [M], in the order of the problem. Raises ValueError where an allocation is of others."""
    try:
        ranks = [allocation.ranks[adapter][module] for adapter, module in problem.names]
    except KeyError as error:
        raise ValueError(f"the allocation has no {error.args[0]!r}") from error
    return np.array(ranks, dtype=np.int64)


def by_adapter(problem: Problem, k: Ints, uniform: Ints) -> list[AdapterNumbers]:
    """The numbers of every adapter, in the problem's order; ``k`` and ``uniform`` are ranks, int64 [M]."""
    after, before, even = (
        problem.by_adapter((ranks * problem.cost).astype(np.float64)) for ranks in (k, problem.rank, uniform)
    )
    kept, whole = problem.adapter_energy(k), problem.adapter_energy(problem.rank)
    energy = np.where(whole > 0, np.minimum(1.0, kept / np.where(whole > 0, whole, 1.0)), 1.0)
    order = np.argsort(problem.owner, kind="stable")
    members = np.split(order, np.cumsum(np.bincount(problem.owner))[:-1])
    return [
        AdapterNumbers(
            name=name,
            modules=len(index),
            rank=int(problem.rank[index].max()),
            least=int(k[index].min()),
            median=float(np.median(k[index])),
            most=int(k[index].max()),
            before=int(before[number]),
            after=int(after[number]),
            uniform=int(even[number]),
            share=float(after[number] / after.sum()),
            uniform_share=float(even[number] / even.sum()),
            energy=float(energy[number]),
        )
        for number, (name, index) in enumerate(zip(problem.adapters, members, strict=True))
    ]


def result_object(
    allocation: AllocationFile,
    adapters: list[AdapterNumbers],
    k: Ints,
    original_bytes: Mapping[str, int],
    bytes_: Mapping[str, Mapping[Layout, int]],
    dtype: str,
) -> dict[str, Any]:
    """What ``loraforge compress --json`` says of a run, made or not: ``loraforge.compress/1`` without the rest.

    ``original_bytes`` and ``bytes_`` (by layout) are of weight files, by adapter.
    """
    layouts = list(next(iter(bytes_.values())))
    return {
        "schema": "loraforge.compress/1",
        "fleet": allocation.fleet,
        "policy": allocation.policy,
        "budget": allocation.budget.model_dump(),
        "floor": allocation.floor,
        "dtype": dtype,
        "parameters": {
            "before": sum(adapter.before for adapter in adapters),
            "after": allocation.spent,
            "slack": allocation.slack,
        },
        "bytes": {
            "before": sum(original_bytes.values()),
            "after": {layout: sum(sizes[layout] for sizes in bytes_.values()) for layout in layouts},
        },
        "ranks": {"least": int(k.min()), "median": float(np.median(k)), "most": int(k.max())},
        "retained_energy": allocation.retained_energy,
        "optimality_gap": allocation.optimality_gap,
        "adapters": {
            adapter.name: {
                "modules": adapter.modules,
                "parameters": {"before": adapter.before, "after": adapter.after, "uniform": adapter.uniform},
                "bytes": {"before": original_bytes[adapter.name], "after": dict(bytes_[adapter.name])},
                "ranks": {
                    "nominal": adapter.rank,
                    "least": adapter.least,
                    "median": adapter.median,
                    "most": adapter.most,
                },
                "retained_energy": adapter.energy,
                "budget_share": adapter.share,
            }
            for adapter in adapters
        },
    }
