"""What a folder of shared-basis compression states of itself (``cts.json``)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from loraforge.cts.accounting import Variant
from loraforge.errors import InputError
from loraforge.files import read_json, write_json

REPORT_FILE = "cts.json"
ARMS: dict[Variant, str] = {"full": "cts", "weighted": "cts-weighted", "diagonal": "cts-diagonal"}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class SharedModule(_Strict):
    """The fit of one module; errors are squared Frobenius norms as the variant's objective weighs them."""

    adapters: int = Field(ge=1, description="adapters that target the module")
    rank: int = Field(ge=1, description="shared rank; min(d_in, d_out) where the common rank is more")
    error: float = Field(ge=0, description="objective of the better start")
    seed: int = Field(description="the better start")


class CtsReport(_Strict):
    """One fleet under shared bases."""

    schema_: Literal["loraforge.cts/1"] = Field("loraforge.cts/1", alias="schema")
    fleet: str
    variant: Variant
    budget: str = Field(description="share of the nominal ranks whose uniform cost is the ceiling")
    ceiling: int = Field(ge=1, description="compact parameters that the budget allows")
    rank: int = Field(ge=1, description="the common shared rank")
    spent: int = Field(ge=1, description="parameters of shared bases and all cores")
    iterations: int = Field(ge=1)
    seeds: tuple[int, ...]
    steps: Literal["exact", "power"]
    precision: Literal["float32", "float64"]
    rounding_error: float = Field(
        ge=0, description="largest action error of exported factors against U S_i V^T"
    )
    modules: dict[str, SharedModule]

    @property
    def arm(self) -> str:
        """The name under which it is scored."""
        return ARMS[self.variant]

    @model_validator(mode="after")
    def _within(self) -> CtsReport:
        if self.spent > self.ceiling:
            raise ValueError(f"spent {self.spent} exceeds the ceiling {self.ceiling}")
        return self


def save_report(folder: Path, report: CtsReport) -> None:
    """Write the report of ``folder`` atomically."""
    write_json(folder / REPORT_FILE, report.model_dump(mode="json", by_alias=True))


def load_report(folder: Path) -> CtsReport:
    """Read the report of ``folder``. Raises InputError that names the file and the key."""
    path = folder / REPORT_FILE
    value = read_json(path)
    try:
        return CtsReport.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or None
        raise InputError(
            f"not a report of shared bases ({first['msg']})",
            path=path,
            key=key,
            remedy="run `loraforge cts` again",
        ) from error
