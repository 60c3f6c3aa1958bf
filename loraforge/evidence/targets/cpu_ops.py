"""CPU operations: microseconds a call of serving's low-rank update, ours and the CPU engine's, by shape and batch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter

from loraforge.errors import InputError
from loraforge.evidence.targets.base import Claim, Record, Summary, Target, at_most

MAX_RELATIVE_L2 = 0.01
MAX_ABSOLUTE = 0.025  # of the greatest magnitude of the reference

Samples = Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)]
Error = Annotated[float, Field(ge=0)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Machine(Record):
    """What ours ran on, libraries preloaded into both, and the copy bandwidth of the memory, read and written."""

    record: Literal["machine"]
    threads: int = Field(ge=1)
    instructions: str
    preloaded: list[str]
    kernels_sha256: Sha256
    copy_gb_s: float = Field(gt=0)


class Engine(Record):
    """Where the baseline comes from, and the hash of its module."""

    record: Literal["engine"]
    distribution: str
    version: str
    sha256: Sha256


class Batch(Record):
    """One update of a batch. Samples are microseconds a call, ours and the engine's paired; bytes are the least that
    the update moves. Errors are those of sampled tokens against FP64, the absolute one in parts of the greatest
    magnitude there."""

    model: str
    projection: str
    phase: Literal["decode", "prefill"]
    tokens: int = Field(ge=1)
    adapters: int = Field(ge=1)
    rank: int = Field(ge=1)
    capacity: int = Field(ge=1)
    bytes: int = Field(ge=1)
    ours_us: Samples
    ours_relative_l2: Error
    ours_absolute: Error
    engine_us: Samples | None = None
    engine_relative_l2: Error | None = None
    engine_absolute: Error | None = None

    @property
    def situation(self) -> str:
        """The batch without its projection: ``SmolLM2-135M.decode.t32.a8.r8.c8``."""
        return f"{self.model}.{self.phase}.t{self.tokens}.a{self.adapters}.r{self.rank}.c{self.capacity}"

    @property
    def passed(self) -> bool:
        return self.ours_relative_l2 <= MAX_RELATIVE_L2 and self.ours_absolute <= MAX_ABSOLUTE

    @property
    def speedup(self) -> float | None:
        """The median over blocks of the engine's time over ours."""
        if self.engine_us is None:
            return None
        return statistics.median(
            theirs / ours for theirs, ours in zip(self.engine_us, self.ours_us, strict=True)
        )


Item = Batch | Machine | Engine


def _kind(value: Any) -> str:
    return str(value.get("record", "batch")) if isinstance(value, dict) else "batch"


class CpuOpsTarget(Target[Item]):
    """``cpu_ops``: one machine, the engine where there was one, and batches."""

    name: ClassVar = "cpu_ops"
    figures: ClassVar = ("cpu_ops",)
    sources: ClassVar = ("ops", "bench", "jit.py")
    record: ClassVar[TypeAdapter[Any]] = TypeAdapter(
        Annotated[
            Annotated[Batch, Tag("batch")]
            | Annotated[Machine, Tag("machine")]
            | Annotated[Engine, Tag("engine")],
            Discriminator(_kind),
        ]
    )

    def check(self, records: Sequence[Item], path: Any) -> None:
        batches = _batches(records)
        if not batches:
            raise InputError("holds no batch", path=path)
        machines = sum(isinstance(item, Machine) for item in records)
        engines = sum(isinstance(item, Engine) for item in records)
        if machines > 1 or engines > 1:
            raise InputError("states its machine or engine twice", path=path)
        if machines == 0:
            raise InputError("does not hold one machine", path=path)
        for item in batches:
            if (item.engine_us is not None) != (engines == 1):
                raise InputError(
                    f"{item.situation}: times of an engine that is not stated, or none", path=path
                )
            if item.engine_us is not None and len(item.engine_us) != len(item.ours_us):
                raise InputError(f"{item.situation}: samples are not paired", path=path)
        if len({(item.situation, item.projection) for item in batches}) != len(batches):
            raise InputError("states a batch twice", path=path)

    def summarise(self, records: Sequence[Item], fleet: str) -> Summary:
        machine = next(item for item in records if isinstance(item, Machine))
        batches = _batches(records)
        summary: Summary = {
            "cases": len(batches),
            "cases_failed": sum(not item.passed for item in batches),
            "threads": machine.threads,
            "copy_gb_s": machine.copy_gb_s,
            "max_relative_l2": max(item.ours_relative_l2 for item in batches),
        }
        layers: dict[str, list[Batch]] = {}
        for item in batches:
            layers.setdefault(item.situation, []).append(item)
        for situation, items in layers.items():
            ours = sum(statistics.median(item.ours_us) for item in items)
            summary[f"{situation}.layer_us"] = ours
            # operands that stay in a cache can beat the memory's floor
            summary[f"{situation}.times_copy_floor"] = (
                ours * 1e3 * machine.copy_gb_s / sum(item.bytes for item in items)
            )
            if all(item.engine_us for item in items):
                summary[f"{situation}.engine_layer_us"] = sum(
                    statistics.median(item.engine_us or ()) for item in items
                )
            for item in items:
                if item.speedup is not None:
                    summary[f"{situation}.{item.projection}.speedup"] = item.speedup
        for phase in ("decode", "prefill"):
            found = [item.speedup for item in batches if item.phase == phase and item.speedup is not None]
            if found:
                summary[f"geomean.{phase}"] = statistics.geometric_mean(found)
                summary[f"worst_cell.{phase}"] = min(found)
        return summary

    def claims(self, records: Sequence[Item]) -> list[Claim]:
        batches = _batches(records)
        return [
            at_most("relative L2 error", max(item.ours_relative_l2 for item in batches), MAX_RELATIVE_L2),
            at_most("absolute error", max(item.ours_absolute for item in batches), MAX_ABSOLUTE),
        ]

    def adapters(self, records: Sequence[Item]) -> list[str]:
        return []

    def inputs(self, records: Sequence[Item]) -> dict[str, str]:
        found: dict[str, str] = {}
        for item in records:
            if isinstance(item, Machine):
                found["kernels/cpu"] = item.kernels_sha256
            elif isinstance(item, Engine):
                found[f"{item.distribution}-{item.version}/lora_ops.py"] = item.sha256
        return found


def _batches(records: Sequence[Item]) -> list[Batch]:
    return [item for item in records if isinstance(item, Batch)]
