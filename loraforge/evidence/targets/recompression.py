"""Recompression: seconds to build a whole fleet's ordered factors, by method, with errors."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter, model_validator

from loraforge.errors import InputError
from loraforge.evidence.targets.base import Claim, Record, Summary, Target, at_most
from loraforge.evidence.targets.spectra import MAX_ACTION_ERROR, MAX_SPECTRUM_ERROR


class Pass(Record):
    """One timed pass of one method over the fleet; stages are parts of ``seconds``."""

    method: str
    number: int = Field(ge=0, alias="pass")
    seconds: float = Field(gt=0)
    stages: dict[str, Annotated[float, Field(ge=0)]]

    @model_validator(mode="after")
    def _parts(self) -> Pass:
        if sum(self.stages.values()) > self.seconds * 1.01 + 1e-3:  # clocks of stages overlap by microseconds
            raise ValueError("stages take longer than the pass")
        return self


class Check(Record):
    """The largest relative errors of one method over ``n`` matrices."""

    record: Literal["check"]
    method: str
    max_action_error: float = Field(ge=0)
    max_spectrum_error: float = Field(ge=0)
    n: int = Field(ge=1)


def _kind(value: Any) -> str:
    return str(value.get("record", "pass")) if isinstance(value, dict) else "pass"


class RecompressionTarget(Target[Pass | Check]):
    """``recompression``: passes and one check a method."""

    name: ClassVar = "recompression"
    figures: ClassVar = ("recompression",)
    sources: ClassVar = ("factor",)
    record: ClassVar[TypeAdapter[Any]] = TypeAdapter(
        Annotated[Annotated[Pass, Tag("pass")] | Annotated[Check, Tag("check")], Discriminator(_kind)]
    )

    def check(self, records: Sequence[Pass | Check], path: Any) -> None:
        timed, checked = passes(records), checks(records)
        if not timed:
            raise InputError("holds no timed pass", path=path)
        if set(timed) != set(checked):
            odd = sorted(set(timed) ^ set(checked))[0]
            raise InputError(f"{odd} has timed passes or an error check, not both", path=path)
        for method, items in timed.items():
            if len({item.number for item in items}) != len(items):
                raise InputError(f"{method} states a pass twice", path=path)

    def summarise(self, records: Sequence[Pass | Check], fleet: str) -> Summary:
        checked = checks(records)
        summary: Summary = {
            f"{fleet}.matrices": max(item.n for item in checked.values()),
            "max_action_error": max(item.max_action_error for item in checked.values()),
            "max_spectrum_error": max(item.max_spectrum_error for item in checked.values()),
        }
        for method, items in passes(records).items():
            key = f"{fleet}.{method}"  # a fleet of another shape is another number
            summary[f"{key}_s"] = statistics.median(item.seconds for item in items)
            summary[f"{key}.passes"] = len(items)
            summary[f"{key}.max_action_error"] = checked[method].max_action_error
            summary[f"{key}.max_spectrum_error"] = checked[method].max_spectrum_error
        return summary

    def claims(self, records: Sequence[Pass | Check]) -> list[Claim]:
        found = []
        for method, item in checks(records).items():
            found += [
                at_most(f"relative action error of {method}", item.max_action_error, MAX_ACTION_ERROR),
                at_most(f"relative spectrum error of {method}", item.max_spectrum_error, MAX_SPECTRUM_ERROR),
            ]
        return found

    def adapters(self, records: Sequence[Pass | Check]) -> list[str]:
        return []


def passes(records: Sequence[Pass | Check]) -> dict[str, list[Pass]]:
    """Timed passes by method, methods in the order of their first pass."""
    found: dict[str, list[Pass]] = {}
    for item in records:
        if isinstance(item, Pass):
            found.setdefault(item.method, []).append(item)
    return found


def checks(records: Sequence[Pass | Check]) -> dict[str, Check]:
    """Error checks by method."""
    return {item.method: item for item in records if isinstance(item, Check)}
