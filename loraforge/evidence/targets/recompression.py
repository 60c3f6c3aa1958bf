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
    """One timed pass of one method over the fleet; stages are parts of ``seconds``.

    ``fleet`` is given where it is not that of the run (a shape fleet); ``n`` where the pass took a sample of so
    many matrices, whose seconds are never taken for those of the fleet. ``devices`` is given where the fleet was
    divided between so many; ``seconds`` are then those of the slowest.
    """

    fleet: str | None = None
    method: str
    n: int | None = Field(default=None, ge=1)
    devices: int | None = Field(default=None, ge=1)
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
    fleet: str | None = None
    method: str
    devices: int | None = Field(default=None, ge=1)
    max_action_error: float = Field(ge=0)
    max_spectrum_error: float = Field(ge=0)
    n: int = Field(ge=1)


class Floor(Record):
    """Least seconds of a stage: ``amount`` bytes, FP64 operations (``flops``) or FP32 operations (``flops32``) at a
    measured ``rate`` a second. A stage may have several; the greatest counts."""

    record: Literal["floor"]
    fleet: str | None = None
    method: str
    stage: str
    bound: Literal["bytes", "flops", "flops32"]
    amount: float = Field(gt=0)
    rate: float = Field(gt=0)
    seconds: float = Field(gt=0)


class Protocol(Record):
    """How often a method ran: ``warmups`` over all that it was timed on, or none but a run over ``warmup_matrices``.

    ``passes`` are fewer than of other methods where all, of ``estimate_s`` each, would have taken longer than
    ``budget_s``.
    """

    record: Literal["protocol"]
    fleet: str | None = None
    method: str
    warmups: int = Field(ge=0)
    warmup_matrices: int = Field(ge=0)
    passes: int = Field(ge=1)
    estimate_s: float = Field(ge=0)
    budget_s: float | None = Field(default=None, ge=0)


Item = Pass | Check | Floor | Protocol


def _kind(value: Any) -> str:
    return str(value.get("record", "pass")) if isinstance(value, dict) else "pass"


class RecompressionTarget(Target[Item]):
    """``recompression``: passes and one check a method, with floors of its stages and what it was timed by."""

    name: ClassVar = "recompression"
    figures: ClassVar = ("recompression",)
    sources: ClassVar = ("factor",)
    record: ClassVar[TypeAdapter[Any]] = TypeAdapter(
        Annotated[
            Annotated[Pass, Tag("pass")]
            | Annotated[Check, Tag("check")]
            | Annotated[Floor, Tag("floor")]
            | Annotated[Protocol, Tag("protocol")],
            Discriminator(_kind),
        ]
    )

    def check(self, records: Sequence[Item], path: Any) -> None:
        timed, checked = passes(records) | samples(records), checks(records)
        if not timed:
            raise InputError("holds no timed pass", path=path)
        if set(timed) != set(checked):
            odd = sorted(set(timed) ^ set(checked))[0]
            raise InputError(f"{odd} has timed passes or an error check, not both", path=path)
        for method, items in timed.items():
            if len({item.number for item in items}) != len(items):
                raise InputError(f"{method} states a pass twice", path=path)
        for item in records:
            if isinstance(item, Protocol) and item.passes != len(timed.get(label(item), [])):
                raise InputError(f"{label(item)} has other passes than its protocol states", path=path)

    def summarise(self, records: Sequence[Item], fleet: str) -> Summary:
        checked = checks(records)
        matrices: dict[str, int] = {}
        for check in checked.values():
            owner = check.fleet or fleet
            matrices[owner] = max(matrices.get(owner, 0), check.n)
        summary: Summary = {f"{owner}.matrices": n for owner, n in matrices.items()}
        summary["max_action_error"] = max(item.max_action_error for item in checked.values())
        summary["max_spectrum_error"] = max(item.max_spectrum_error for item in checked.values())
        floors = _floors(records)
        for name, items in passes(records).items():
            key = (
                f"{items[0].fleet or fleet}.{_method(items[0])}"  # a fleet of another shape is another number
            )
            summary[f"{key}_s"] = statistics.median(item.seconds for item in items)
            summary[f"{key}.passes"] = len(items)
            summary[f"{key}.max_action_error"] = checked[name].max_action_error
            summary[f"{key}.max_spectrum_error"] = checked[name].max_spectrum_error
            for stage, least in floors.get(name, {}).items():
                took = statistics.median(item.stages.get(stage, 0.0) for item in items)
                summary[f"{key}.{stage}.floor_s"] = least.seconds
                if took > 0:
                    summary[f"{key}.{stage}_s"] = took
                    summary[f"{key}.{stage}.times_floor"] = took / least.seconds
        for item in records:
            if isinstance(item, Protocol):
                key = f"{item.fleet or fleet}.{item.method}"
                summary[f"{key}.warmups"] = item.warmups
                summary[f"{key}.warmup_matrices"] = item.warmup_matrices
                for stage, least in floors.get(label(item), {}).items():
                    summary[f"{key}.{stage}.bound"] = least.bound
        summary |= _scaling(records, fleet)
        for items in samples(records).values():
            key = f"{items[0].fleet or fleet}.{items[0].method}"
            taken = items[0].n or 0
            median = statistics.median(item.seconds for item in items)
            summary[f"{key}.sample_s"] = median
            summary[f"{key}.sample_matrices"] = taken
            if (total := matrices[items[0].fleet or fleet]) > taken:
                summary[f"{key}.extrapolated_s"] = median * total / taken
        return summary

    def claims(self, records: Sequence[Item]) -> list[Claim]:
        found = []
        for method, item in checks(records).items():
            found += [
                at_most(f"relative action error of {method}", item.max_action_error, MAX_ACTION_ERROR),
                at_most(f"relative spectrum error of {method}", item.max_spectrum_error, MAX_SPECTRUM_ERROR),
            ]
        return found

    def adapters(self, records: Sequence[Item]) -> list[str]:
        return []


def label(item: Item) -> str:
    """The method, after the fleet where the record names one: ``gram``, ``qwen50.gram``, ``qwen50.gram_x4``."""
    return _method(item) if item.fleet is None else f"{item.fleet}.{_method(item)}"


def _method(item: Item) -> str:
    devices = item.devices if isinstance(item, Pass | Check) else None
    return item.method if devices is None else f"{item.method}_x{devices}"


def _scaling(records: Sequence[Item], fleet: str) -> Summary:
    """``scaling.xN``: seconds of one device over those of N, by the passes that state their devices; after the name
    of the fleet where several were divided."""
    medians: dict[str, dict[int, float]] = {}
    for items in passes(records).values():
        if items[0].devices is not None:
            owner = medians.setdefault(f"{items[0].fleet or fleet}.{items[0].method}", {})
            owner[items[0].devices] = statistics.median(item.seconds for item in items)
    return {
        f"{f'{owner}.' if len(medians) > 1 else ''}scaling.x{devices}": found[1] / seconds
        for owner, found in medians.items()
        if 1 in found
        for devices, seconds in found.items()
        if devices > 1
    }


def passes(records: Sequence[Item]) -> dict[str, list[Pass]]:
    """Timed passes over whole fleets by :func:`label`, in the order of their first pass."""
    return _timed(records, sampled=False)


def samples(records: Sequence[Item]) -> dict[str, list[Pass]]:
    """As :func:`passes`, over samples."""
    return _timed(records, sampled=True)


def _timed(records: Sequence[Item], *, sampled: bool) -> dict[str, list[Pass]]:
    found: dict[str, list[Pass]] = {}
    for item in records:
        if isinstance(item, Pass) and (item.n is not None) == sampled:
            found.setdefault(label(item), []).append(item)
    return found


def checks(records: Sequence[Item]) -> dict[str, Check]:
    """Error checks by :func:`label`."""
    return {label(item): item for item in records if isinstance(item, Check)}


def _floors(records: Sequence[Item]) -> dict[str, dict[str, Floor]]:
    """The greatest floor of each stage, by :func:`label`."""
    found: dict[str, dict[str, Floor]] = {}
    for item in records:
        if isinstance(item, Floor):
            stages = found.setdefault(label(item), {})
            if item.stage not in stages or item.seconds > stages[item.stage].seconds:
                stages[item.stage] = item
    return found
