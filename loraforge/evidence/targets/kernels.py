"""Records of the kernel benchmark and what its three targets compute from them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter, model_validator

from loraforge.errors import InputError
from loraforge.evidence.targets.base import Claim, Record, Summary, Target, at_most

PAPER_RANKS = (1, 2, 4, 8, 12, 16)
NATIVE = ("csgmv", "csgmv_tuned", "triton_v2", "vllm", "vllm_tuned")
SHIPPED = ("csgmv",)  # as SGLang 0.5.22 serves without tuning
CSGMV = ("csgmv", "csgmv_tuned")  # of the engine that the paper is about
AUTO = "auto"
BLOCKS = 5
MAX_RELATIVE_L2 = 0.01
MAX_ABSOLUTE = 0.025

Micros = Annotated[float, Field(gt=0)]
Error = Annotated[float, Field(ge=0)]


class Setting(Record):
    """Of a run: measured floors, the frozen dispatch table, and the seed of operands and orders.

    bytes_per_us: read and written by a large copy. launch_us, flushed_us: an empty kernel, as warm and flushed samples
    are taken.
    """

    record: Literal["setting"]
    device: str
    seed: int
    bytes_per_us: Micros
    launch_us: Micros
    flushed_us: Micros
    table_sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    engines: list[str]


class Arm(Record):
    """One way to compute a cell: samples a block where its check passed.

    relative_l2, absolute: against FP64 on sampled rows; native_*: against native CSGMV on all.
    """

    arm: str
    variant: str | None = None
    launches: int | None = Field(default=None, ge=1)
    passed: bool
    error: str | None = None
    relative_l2: Error | None = None
    absolute: Error | None = None
    native_relative_l2: Error | None = None
    native_absolute: Error | None = None
    warm_us: list[Micros] = Field(default_factory=list)
    flushed_us: list[Micros] = Field(default_factory=list)

    @model_validator(mode="after")
    def _timed_where_passed(self) -> Arm:
        if self.passed != bool(self.warm_us):
            raise ValueError("is timed without having passed its check, or the reverse")
        if self.passed and self.error is not None:
            raise ValueError("passed with an error")
        for value, limit in (
            (self.relative_l2, MAX_RELATIVE_L2),
            (self.native_relative_l2, MAX_RELATIVE_L2),
            (self.absolute, MAX_ABSOLUTE),
            (self.native_absolute, MAX_ABSOLUTE),
        ):
            if self.passed and value is not None and value >= limit:
                raise ValueError(f"passed with an error of {value}")
        return self


class Cell(Record):
    """One operation on one case. A cell of projection ``layer`` is the four of a layer one after another.

    group: the grid it belongs to. layer: of whole layers, which. mix: the name of a mix of ranks, of which ``rank`` is
    the greatest. capacity: directions that the engines' pools have room for.
    """

    record: Literal["cell"]
    group: Literal["sweep", "layer", "ablation"]
    layer: str | None = None
    model: str
    projection: Literal["qkv", "o", "gate_up", "down", "layer"]
    phase: Literal["decode", "prefill"]
    tokens: int = Field(ge=1)
    adapters: int = Field(ge=1)
    rank: int = Field(ge=1)
    mix: str | None = None
    capacity: int = Field(ge=1)
    op: Literal["shrink", "expand", "lora"]
    floor_us: Micros
    arms: list[Arm] = Field(min_length=1)

    @property
    def case(self) -> tuple[Any, ...]:
        """What identifies the cell."""
        return (
            self.group, self.layer, self.model, self.projection, self.phase, self.tokens, self.adapters, self.rank,
            self.mix, self.capacity, self.op,
        )  # fmt: skip

    def us(self, arm: str, cache: str = "warm") -> float | None:
        """The median of an arm's samples, None where it was not timed."""
        for item in self.arms:
            if item.arm == arm:
                samples = item.warm_us if cache == "warm" else item.flushed_us
                return statistics.median(samples) if samples else None
        return None

    def best(self, arms: Iterable[str], cache: str = "warm") -> float | None:
        """The least median among arms."""
        found = [time for arm in arms if (time := self.us(arm, cache)) is not None]
        return min(found) if found else None


class Resources(Record):
    """Compiled attributes of one RowExpand kernel: registers and local bytes a thread, shared bytes a block, blocks a
    multiprocessor that fit, and the share of its warps that these are."""

    record: Literal["resources"]
    staged: bool
    width: int = Field(ge=1)
    threads: int = Field(ge=1)
    registers: int = Field(ge=1)
    local_bytes: int = Field(ge=0)
    shared_bytes: int = Field(ge=0)
    blocks_per_sm: int = Field(ge=1)
    occupancy: float = Field(gt=0, le=1)


Item = Setting | Cell | Resources


class KernelTarget(Target[Item]):
    """Base of the three: one setting, cells stated once, each of a kind that the target takes."""

    sources: ClassVar = ("bench", "ops", "dispatch")
    record: ClassVar[TypeAdapter[Any]] = TypeAdapter(
        Annotated[
            Annotated[Setting, Tag("setting")]
            | Annotated[Cell, Tag("cell")]
            | Annotated[Resources, Tag("resources")],
            Discriminator("record"),
        ]
    )

    def check(self, records: Sequence[Item], path: Any) -> None:
        settings = [item for item in records if isinstance(item, Setting)]
        if len(settings) != 1:
            what = "states the setting of the run twice" if settings else "lacks the setting of the run"
            raise InputError(what, path=path)
        found = cells(records)
        if not found:
            raise InputError("holds no timed case", path=path)
        seen: set[tuple[Any, ...]] = set()
        for cell in found:
            if cell.case in seen:
                raise InputError(f"states a case twice: {cell.case}", path=path)
            seen.add(cell.case)
            for arm in cell.arms:
                if arm.passed and len(arm.warm_us) < BLOCKS:
                    raise InputError(f"{arm.arm} has {len(arm.warm_us)} blocks: {cell.case}", path=path)

    def claims(self, records: Sequence[Item]) -> list[Claim]:
        found = cells(records)
        arms = [arm for cell in found for arm in cell.arms if arm.passed]
        return [
            at_most("cases in which a kernel of ours failed, or no native one passed", failures(found), 0),
            at_most(
                "relative L2 error",
                max((arm.relative_l2 or 0.0 for arm in arms), default=0.0),
                MAX_RELATIVE_L2,
            ),
            at_most("absolute error", max((arm.absolute or 0.0 for arm in arms), default=0.0), MAX_ABSOLUTE),
        ]

    def adapters(self, records: Sequence[Item]) -> list[str]:
        return []


def cells(records: Sequence[Item]) -> list[Cell]:
    """The timed cases."""
    return [item for item in records if isinstance(item, Cell)]


def counted(records: Sequence[Item]) -> Summary:
    """``cases``, ``cases_failed``, and checks that a native kernel failed (it is then not timed)."""
    found = cells(records)
    return {
        "cases": len(found),
        "cases_failed": failures(found),
        "native_failures": sum(not arm.passed for cell in found for arm in cell.arms if arm.arm in NATIVE),
    }


def failures(found: Sequence[Cell]) -> int:
    """Cases in which a kernel of ours failed, or in which no native one passed."""
    return sum(
        any(not arm.passed for arm in cell.arms if arm.arm not in NATIVE)
        or (cell.best(NATIVE) is None and cell.projection != "layer")
        for cell in found
    )


def sweep(records: Sequence[Item], op: str, phase: str, *, tight: bool = True) -> list[Cell]:
    """Cells of the paper's grid: its ranks, in tight pools or in those of capacity 128."""
    return [
        cell
        for cell in cells(records)
        if cell.group == "sweep"
        and (cell.op, cell.phase) == (op, phase)
        and cell.rank in PAPER_RANKS
        and (cell.capacity == cell.rank) == tight
    ]


def speedups(found: Iterable[Cell], arm: str, over: Sequence[str], cache: str = "warm") -> list[float]:
    """The best time among the arms ``over``, in times of ``arm``, of the cells that have both."""
    quotients = []
    for cell in found:
        ours, other = cell.us(arm, cache), cell.best(over, cache)
        if ours is not None and other is not None:
            quotients.append(other / ours)
    return quotients


def geomean(values: Sequence[float]) -> float:
    """The equal-weight geometric mean."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def compared(found: Sequence[Cell], name: str) -> Summary:
    """Summary keys of one grid: the automatic choice and every kernel of ours over the best native one (tuned ones
    included), warm and flushed; over CSGMV, the better of shipped and tuned, and as shipped where that ran; and how
    many times the floor ours and the best native one take."""
    summary: Summary = {}
    for cache, suffix in (("warm", ""), ("flushed", ".flushed")):
        if values := speedups(found, AUTO, NATIVE, cache):
            summary[f"geomean.{name}{suffix}"] = geomean(values)
            summary[f"cases.{name}{suffix}"] = len(values)
    for what, over in (("shipped", SHIPPED), ("csgmv", CSGMV)):
        if values := speedups(found, AUTO, over):
            summary[f"geomean.{name}.over_{what}"] = geomean(values)
    if best := [time / cell.floor_us for cell in found if (time := cell.best(NATIVE)) is not None]:
        summary[f"times_floor.{name}.native"] = geomean(best)
    for arm in sorted({arm.arm for cell in found for arm in cell.arms} - set(NATIVE)):
        if arm != AUTO and (values := speedups(found, arm, NATIVE)):
            summary[f"geomean.{name}.{arm}"] = geomean(values)
        floors = [time / cell.floor_us for cell in found if (time := cell.us(arm)) is not None]
        if floors:
            summary[f"times_floor.{name}.{arm}"] = geomean(floors)
    return summary


def settings(records: Sequence[Item]) -> Summary:
    """The floors of the run."""
    (item,) = (item for item in records if isinstance(item, Setting))
    return {
        "copy_gib_s": item.bytes_per_us * 1e6 / 2**30,
        "launch_us": item.launch_us,
        "launch_flushed_us": item.flushed_us,
    }
