"""The allocation file: the ranks that a policy chose, as later stages read them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from loraforge.allocate.policy import FLOORS, Allocation
from loraforge.allocate.problem import Problem
from loraforge.config import Policy
from loraforge.errors import InputError
from loraforge.files import read_json, write_json


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class BudgetEntry(_Strict):
    """The budget as asked for, and the ceiling on compact parameters that it means."""

    kind: Literal["fraction", "params", "bytes"]
    value: str
    params: int = Field(ge=1)


class AllocationFile(_Strict):
    """Retained ranks of a whole fleet (JSON). Energies are squared effective singular values."""

    schema_: Literal["loraforge.allocation/1"] = Field("loraforge.allocation/1", alias="schema")
    fleet: str
    policy: Policy
    budget: BudgetEntry
    floor: str = Field(description="rule of the rank floor; u is the uniform rank")
    spent: int = Field(ge=1, description="compact parameters of the whole fleet")
    slack: int = Field(ge=0, description="ceiling minus spent")
    optimality_gap: float = Field(ge=0, description="bound on the energy that a better choice could add")
    retained_energy: float = Field(
        ge=0, le=1, description="share of the fleet's absolute energy that is kept"
    )
    ranks: dict[str, dict[str, Annotated[int, Field(ge=0)]]] = Field(
        description="adapter -> module -> k; a module of rank 0 goes"
    )

    @model_validator(mode="after")
    def _adds_up(self) -> AllocationFile:
        if self.spent + self.slack != self.budget.params:
            raise ValueError(
                f"spent {self.spent} and slack {self.slack} are not the budget {self.budget.params}"
            )
        return self


def allocation_file(fleet: str, problem: Problem, allocation: Allocation) -> AllocationFile:
    """The file's contents for an allocation of the fleet named ``fleet``."""
    ranks: dict[str, dict[str, int]] = {}
    for (adapter, module), k in zip(problem.names, allocation.k.tolist(), strict=True):
        ranks.setdefault(adapter, {})[module] = k
    return AllocationFile(
        fleet=fleet,
        policy=allocation.policy,
        budget=BudgetEntry(
            kind=allocation.budget.kind, value=allocation.budget.value, params=allocation.ceiling.params
        ),
        floor=FLOORS[allocation.policy],
        spent=allocation.spent,
        slack=allocation.slack,
        optimality_gap=allocation.gap,
        retained_energy=allocation.retained_energy,
        ranks=ranks,
    )


def save_allocation(allocation: AllocationFile, path: Path) -> None:
    """Write an allocation file atomically."""
    write_json(path, allocation.model_dump(mode="json", by_alias=True))


def load_allocation(path: Path) -> AllocationFile:
    """Read an allocation file. Raises InputError that names the file and the key."""
    value = read_json(path)
    try:
        return AllocationFile.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise InputError(
            f"not an allocation file ({first['msg']})",
            path=path,
            key=key or None,
            remedy="make it with `loraforge allocate`",
        ) from error
