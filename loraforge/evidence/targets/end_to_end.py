"""End-to-end compression: seconds from a fleet's weight files to its compressed ones, by stage."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter, model_validator

from loraforge.errors import InputError
from loraforge.evidence.targets.base import Claim, Record, Summary, Target, at_most

Stage = Literal["load", "hash", "factor", "allocate", "export"]
# twice the spacing of BF16 at one, which the exporter accepts
MAX_ACTION_ERROR = 2.0**-6


class Pass(Record):
    """One timed pass from files to files: by arm ``cached`` with a factor cache that it fills, by ``deferred`` without.
    Bytes are those of the weights read, and of the weight files written."""

    fleet: str
    arm: Literal["deferred", "cached"] = "deferred"
    number: int = Field(ge=0, alias="pass")
    budget: str
    seconds: float = Field(gt=0)
    stages: dict[Stage, Annotated[float, Field(ge=0)]]
    bytes_in: int = Field(ge=1)
    bytes_out: int = Field(ge=1)

    @model_validator(mode="after")
    def _parts(self) -> Pass:
        if sum(self.stages.values()) > self.seconds * 1.01 + 1e-3:
            raise ValueError("stages take longer than the pass")
        return self


class Check(Record):
    """The largest relative action error of the exported factors over ``n`` matrices and all passes."""

    record: Literal["check"]
    fleet: str
    max_action_error: float = Field(ge=0)
    n: int = Field(ge=1)


class Floor(Record):
    """Bytes a second that a copy from pinned memory to the device was measured to take."""

    record: Literal["floor"]
    fleet: str
    rate: float = Field(gt=0)


Item = Pass | Check | Floor


def _kind(value: Any) -> str:
    return str(value.get("record", "pass")) if isinstance(value, dict) else "pass"


class EndToEndTarget(Target[Item]):
    """``end_to_end_compression``: passes by arm and one check a fleet, and the copy rate where there is a device."""

    name: ClassVar = "end_to_end_compression"
    figures: ClassVar = ()
    sources: ClassVar = (
        "factor",
        "allocate",
        "export",
        "compress.py",
        "tensor_file.py",
        "bench/end_to_end.py",
    )
    record: ClassVar[TypeAdapter[Any]] = TypeAdapter(
        Annotated[
            Annotated[Pass, Tag("pass")] | Annotated[Check, Tag("check")] | Annotated[Floor, Tag("floor")],
            Discriminator(_kind),
        ]
    )

    def check(self, records: Sequence[Item], path: Any) -> None:
        timed = _passes(records)
        if not timed:
            raise InputError("holds no timed pass", path=path)
        checked = {item.fleet for item in records if isinstance(item, Check)}
        if odd := sorted({items[0].fleet for items in timed.values()} ^ checked):
            raise InputError(f"{odd[0]} has timed passes or an error check, not both", path=path)
        for items in timed.values():
            fleet = items[0].fleet
            if len({item.number for item in items}) != len(items):
                raise InputError(f"{fleet} states a pass twice", path=path)
            if len({(item.budget, item.bytes_in, item.bytes_out) for item in items}) != 1:
                raise InputError(f"passes over {fleet} did not do the same work", path=path)

    def summarise(self, records: Sequence[Item], fleet: str) -> Summary:
        summary: Summary = {}
        for owner, items in _passes(records).items():
            seconds = statistics.median(item.seconds for item in items)
            summary[f"{owner}.end_to_end_s"] = seconds
            summary[f"{owner}.passes"] = len(items)
            for stage in items[0].stages:
                summary[f"{owner}.{stage}_s"] = statistics.median(
                    item.stages.get(stage, 0.0) for item in items
                )
            summary[f"{owner}.bytes_in"] = items[0].bytes_in
            summary[f"{owner}.bytes_out"] = items[0].bytes_out
        for item in records:
            if isinstance(item, Check):
                summary[f"{item.fleet}.matrices"] = item.n
                summary[f"{item.fleet}.max_action_error"] = item.max_action_error
            elif isinstance(item, Floor):
                for owner, items in _passes(records).items():
                    if items[0].fleet == item.fleet:
                        least = items[0].bytes_in / item.rate
                        summary[f"{item.fleet}.copy_floor_s"] = least
                        summary[f"{owner}.fraction_of_copy_floor"] = least / float(
                            summary[f"{owner}.end_to_end_s"]
                        )
        return summary

    def claims(self, records: Sequence[Item]) -> list[Claim]:
        return [
            at_most(f"relative action error of {item.fleet}", item.max_action_error, MAX_ACTION_ERROR)
            for item in records
            if isinstance(item, Check)
        ]

    def adapters(self, records: Sequence[Item]) -> list[str]:
        return []


def _passes(records: Sequence[Item]) -> dict[str, list[Pass]]:
    """By the owner of their keys in a summary: the fleet, and for an arm other than the plain one both."""
    found: dict[str, list[Pass]] = {}
    for item in records:
        if isinstance(item, Pass):
            owner = item.fleet if item.arm == "deferred" else f"{item.fleet}.{item.arm}"
            found.setdefault(owner, []).append(item)
    return found
