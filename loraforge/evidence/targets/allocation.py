"""Allocation: the retained rank of every module under every policy and budget."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Discriminator, Field, Tag, TypeAdapter, model_validator

from loraforge.errors import InputError
from loraforge.evidence.targets.base import Claim, Record, Summary, Target, at_most


class Choice(Record):
    """The rank ``k`` that a policy leaves one module; ``cost`` is d_in + d_out parameters a direction."""

    adapter: str
    module: str
    kind: str
    layer: Annotated[int, Field(ge=0)] | None
    policy: str
    budget: str
    rank: int = Field(ge=1)
    k: int = Field(ge=0)
    cost: int = Field(ge=1)
    energy: float = Field(ge=0)

    @model_validator(mode="after")
    def _bounded(self) -> Choice:
        if self.k > self.rank:
            raise ValueError(f"keeps {self.k} of {self.rank} directions")
        Fraction(self.budget)
        return self


class Allotment(Record):
    """Totals of one policy at one budget, in parameters; ``gap`` bounds the energy lost against the optimum."""

    record: Literal["allocation"]
    policy: str
    budget: str
    spent: int = Field(ge=0)
    ceiling: int = Field(ge=0)
    slack: int
    gap: float = Field(ge=0)
    seconds: float = Field(ge=0)


Arm = tuple[str, str]  # policy, budget


def _kind(value: Any) -> str:
    return str(value.get("record", "choice")) if isinstance(value, dict) else "choice"


class AllocationTarget(Target[Choice | Allotment]):
    """``allocation``: a Choice a module and one Allotment, for each policy at each budget."""

    name: ClassVar = "allocation"
    figures: ClassVar = ("allocation",)
    sources: ClassVar = ("allocate",)
    record: ClassVar[TypeAdapter[Any]] = TypeAdapter(
        Annotated[
            Annotated[Choice, Tag("choice")] | Annotated[Allotment, Tag("allocation")], Discriminator(_kind)
        ]
    )

    def check(self, records: Sequence[Choice | Allotment], path: Any) -> None:
        chosen, totals = choices(records), allotments(records)
        if not chosen:
            raise InputError("holds no module", path=path)
        if set(chosen) != set(totals):
            odd = sorted(set(chosen) ^ set(totals))[0]
            raise InputError(f"{odd[0]} at {odd[1]} has modules or totals, not both", path=path)
        if sum(isinstance(item, Allotment) for item in records) != len(totals):
            raise InputError("states the totals of an arm twice", path=path)
        modules = {arm: [(item.adapter, item.module) for item in items] for arm, items in chosen.items()}
        first_arm, first = next(iter(modules.items()))
        for arm, names in modules.items():
            if len(set(names)) != len(names):
                raise InputError(f"{arm[0]} at {arm[1]} states a module twice", path=path)
            if set(names) != set(first):
                raise InputError(
                    f"{arm[0]} at {arm[1]} and {first_arm[0]} at {first_arm[1]} differ in modules", path=path
                )

    def summarise(self, records: Sequence[Choice | Allotment], fleet: str) -> Summary:
        chosen, totals = choices(records), allotments(records)
        any_arm = next(iter(chosen.values()))
        summary: Summary = {
            f"{fleet}.adapters": len(self.adapters(records)),
            f"{fleet}.modules": len(any_arm),
            f"{fleet}.parameters": sum(item.rank * item.cost for item in any_arm),
        }
        for (policy, budget), total in totals.items():
            key = f"allocation.{policy}.{budget}"
            items = chosen[policy, budget]
            summary |= {
                f"{key}.spent": spent(items),
                f"{key}.slack": total.ceiling - spent(items),
                f"{key}.gap": total.gap,
                f"{key}.solve_s": total.seconds,
                f"{key}.gini": gini(items),
            }
        return summary

    def claims(self, records: Sequence[Choice | Allotment]) -> list[Claim]:
        chosen = choices(records)
        found = []
        for (policy, budget), total in allotments(records).items():
            arm = f"{policy} at {budget}"
            used = spent(chosen[policy, budget])
            found += [
                at_most(f"parameters spent by {arm}", used, total.ceiling),
                at_most(f"difference of stated and summed parameters of {arm}", abs(used - total.spent), 0),
                at_most(
                    f"difference of stated and summed slack of {arm}",
                    abs(total.ceiling - used - total.slack),
                    0,
                ),
            ]
        return found

    def adapters(self, records: Sequence[Choice | Allotment]) -> list[str]:
        return sorted({item.adapter for item in records if isinstance(item, Choice)})


def choices(records: Sequence[Choice | Allotment]) -> dict[Arm, list[Choice]]:
    """Choices by (policy, budget), arms in the order of their first record."""
    found: dict[Arm, list[Choice]] = {}
    for item in records:
        if isinstance(item, Choice):
            found.setdefault((item.policy, item.budget), []).append(item)
    return found


def allotments(records: Sequence[Choice | Allotment]) -> dict[Arm, Allotment]:
    """Totals by (policy, budget), in the order of the records."""
    return {(item.policy, item.budget): item for item in records if isinstance(item, Allotment)}


def spent(items: Sequence[Choice]) -> int:
    """Parameters that the retained directions take."""
    return sum(item.k * item.cost for item in items)


def lorenz(items: Sequence[Choice]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Lorenz curve of an allocation: modules in order of the share of their rank that is kept, least first.

    Returns x, the cumulative share of original parameters, and y, the cumulative share of the spent budget, each
    float64 [modules + 1] from 0 to 1. An allocation that keeps the same share of every module is the diagonal.
    """
    ordered = sorted(items, key=lambda item: (Fraction(item.k, item.rank), item.adapter, item.module))
    full = np.array([0] + [item.rank * item.cost for item in ordered], dtype=np.float64).cumsum()
    kept = np.array([0] + [item.k * item.cost for item in ordered], dtype=np.float64).cumsum()
    return full / full[-1], kept / max(kept[-1], 1.0)


def gini(items: Sequence[Choice]) -> float:
    """Gini coefficient of the Lorenz curve: 0 where every module keeps the same share, near 1 where few keep all."""
    x, y = lorenz(items)
    return float(1.0 - np.sum(np.diff(x) * (y[1:] + y[:-1])))
