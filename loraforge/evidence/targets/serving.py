"""Records of a serving experiment (``loraforge bench sweep``) and what its targets compute from them.

Which engine served is in the records alone: another engine's edition of a study is another target of the same class.
Averages are over seeds, of quantiles within a run (paper, Table 3); quotients are geometric means over paired seeds
(section 6.5).
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from loraforge.errors import InputError
from loraforge.evidence.tables import same
from loraforge.evidence.targets.base import Claim, Summary, Target, at_most
from loraforge.evidence.targets.kernels import geomean
from loraforge.files import sha256_file
from loraforge.serving.arms import BASE_ONLY, Arm
from loraforge.serving.metrics import Spread, spread
from loraforge.serving.metrics import summarise as figures_of
from loraforge.serving.points import (
    PointRecord,
    SettingRecord,
    StartRecord,
    Sweep,
    SweepRecord,
    WorkloadHashes,
    assemble,
)
from loraforge.serving.records import Stop, read_run
from loraforge.serving.workload import Lengths

MAX_FAILED = 0.01  # of the requests: beyond it a throughput is of other work than the one declared
GIB = 2**30
FULL = "_full"
# of a point's figures, those that are averaged; the last two are of its window
METRICS = (
    *(
        "tok_s",
        "requests_s",
        "output_tokens",
        "ttft_p50_s",
        "ttft_p99_s",
        "tpot_p50_ms",
        "tpot_p99_ms",
        "lag_p99_ms",
    ),
    *("loads", "source_gib"),
)

# quotient -> arms, numerator first; an arm with room for every adapter is held against others that have it too
COMPARISONS = {
    "s12_over_original": ("spectral_loraforge", "original_native"),
    "s12_over_base": ("spectral_loraforge", BASE_ONLY),
    "execution_only": ("spectral_loraforge", "spectral_native"),
    "execution_uniform": ("uniform_loraforge", "uniform_native"),
    "execution_original": ("original_loraforge", "original_native"),
    "weights_only": ("spectral_native", "original_native"),
    "original_over_base": ("original_loraforge", BASE_ONLY),
}

Item = SettingRecord | StartRecord | PointRecord
Cell = tuple[str, float]  # arm and offered rate


@dataclass(frozen=True)
class Average:
    """A figure of one arm at one rate: mean and sample standard deviation (None of one) over ``seeds``."""

    arm: str
    rate: float
    metric: str
    over: Spread
    seeds: int


@dataclass(frozen=True)
class Quotient:
    """A figure of ``arm`` in times of that of ``other`` at one rate, the geometric mean over paired seeds."""

    name: str
    arm: str
    other: str
    rate: float
    value: float


class FleetTerms(BaseModel):
    """What a figure has to say of one fleet."""

    output_tokens: Lengths
    vocabulary: dict[str, Any] | None = Field(None, description="given where prompts are drawn token ids")
    budget_gib: float | None = None
    adapters: dict[str, str] = Field(default_factory=dict, description="weights -> folder")

    @property
    def shares(self) -> set[str]:
        """Budgets of compressed fleets, which their folders are named by: ``spectral_1-12`` is ``1/12``."""
        found = (re.search(r"_(\d+)-(\d+)$", folder) for folder in self.adapters.values())
        return {f"{match[1]}/{match[2]}" for match in found if match}


class Terms(BaseModel):
    """What a figure has to say of an experiment, out of its whole configuration."""

    fleets: dict[str, FleetTerms] = Field(min_length=1)
    stop: Stop
    lengths_of: str | None = None
    decode_steps: int = 0


class ServingTarget(Target[Item]):
    """Base of the studies: one setting, points with all declared seeds, the same workload for every arm."""

    sources: ClassVar = ("serving", "runtime", "ops", "dispatch", "jit.py")
    record: ClassVar[TypeAdapter[Any]] = TypeAdapter(SweepRecord)

    def check(self, records: Sequence[Item], path: str | Path) -> None:
        settings = sum(isinstance(record, SettingRecord) for record in records)
        if settings > 1:
            raise InputError("states the setting twice", path=path)
        sweep = assemble(records, path)
        if sweep.setting.experiment != self.name:
            raise InputError(f"is an experiment {sweep.setting.experiment!r}, no {self.name}", path=path)
        _terms(sweep.setting, path)
        for start in sweep.starts:
            _check_execution(start, path)
        declared = {(load.rate, load.seed): load for load in sweep.setting.workloads}
        for point in sweep.points:
            _check_workload(point, declared, path)
            _check_requests(point, Path(path).parent / point.requests)
        if not measured(records):
            raise InputError("has no arm with every declared seed of a rate", path=path)

    def summarise(self, records: Sequence[Item], fleet: str) -> Summary:
        found = setting(records)
        points = _flat(measured(records))
        summary: Summary = {"engine": found.engine, "seeds": len({load.seed for load in found.workloads})}
        summary |= counts(records)
        for average in averages(records):
            key = f"{average.metric}.{average.arm}.{average.rate:g}"
            summary[key] = average.over.mean
            if average.over.std is not None:
                summary[f"{key}.std"] = average.over.std
        for prefix, metric in (("ratio", "tok_s"), ("tpot_ratio", "tpot_p99_ms")):
            for quotient in compared(records, metric):
                summary[f"{prefix}.{quotient.name}.{quotient.rate:g}"] = quotient.value
        for arm, loads in _loads(points).items():
            summary[f"loads.{arm}"] = loads
        for arm, held in pools(records).items():
            summary[f"pool_bytes.{arm}"] = held
        for arm, peak in peaks(records).items():
            summary[f"peak_allocated_bytes.{arm}"] = peak
        return summary | _by_fleet(points)

    def claims(self, records: Sequence[Item]) -> list[Claim]:
        points = _flat(measured(records))
        return [
            at_most(
                "share of an averaged point's requests that failed",
                max(_count([point], "failed") / _count([point], "requests") for point in points),
                MAX_FAILED,
            )
        ]

    def adapters(self, records: Sequence[Item]) -> list[str]:
        return []  # a shape fleet's are in no lock

    def inputs(self, records: Sequence[Item]) -> dict[str, str]:
        loads = setting(records).workloads
        return {f"workloads/{load.rate:g}-{load.seed}": load.sha256 for load in loads}

    def original_hashes(self, records: Sequence[Item]) -> dict[str, str]:
        fleets = setting(records).adapters.values()
        return {name: digest for fleet in fleets for name, digest in fleet.get("original", {}).items()}


class MixedServingVllm(ServingTarget):
    """``mixed_serving_vllm``: both fleets on one device under byte budgets, over offered rates (Fig. 12, B.1)."""

    name: ClassVar = "mixed_serving_vllm"
    figures: ClassVar = ("mixed_serving_vllm",)


class SixCell(ServingTarget):
    """``six_cell``: weights by execution on one fleet, lengths, KV and resident adapters alike (Fig. 7, Table 3)."""

    name: ClassVar = "six_cell"
    figures: ClassVar = ("six_cell",)


class FixedWork(ServingTarget):
    """``fixed_work``: the deployed arms with equal output counts and their loads (Fig. 16, Table 4, B.5)."""

    name: ClassVar = "fixed_work"
    figures: ClassVar = ("fixed_work",)


class Residency(ServingTarget):
    """``residency``: weights by execution by room for some or for all adapters (Fig. 8)."""

    name: ClassVar = "residency"
    figures: ClassVar = ("residency",)


class CpuServing(ServingTarget):
    """``cpu_serving``: real adapters and prompts on a processor, over offered rates."""

    name: ClassVar = "cpu_serving"
    figures: ClassVar = ("cpu_serving",)


def measured(records: Sequence[Item]) -> dict[Cell, tuple[PointRecord, ...]]:
    """Points by arm and rate, by seed, of those that have every seed that the setting declares for the rate.

    What ended early does not count, and what lacks a seed is no average (paper B.5 leaves such points out too).
    """
    sweep = _sweep(records)
    found: dict[Cell, dict[int, PointRecord]] = {}
    for point in sweep.complete:
        found.setdefault((point.arm, point.rate), {})[point.seed] = point
    seeds: dict[float, list[int]] = {}
    for load in sweep.setting.workloads:
        seeds.setdefault(load.rate, []).append(load.seed)
    return {
        (arm, rate): tuple(found[arm, rate][seed] for seed in sorted(wanted))
        for arm in sweep.setting.arms
        for rate, wanted in seeds.items()
        if set(wanted) <= found.get((arm, rate), {}).keys()
    }


def setting(records: Sequence[Item]) -> SettingRecord:
    """The setting of an experiment."""
    return _sweep(records).setting


def counts(records: Sequence[Item]) -> dict[str, int]:
    """Points that averages are of, those declared and those that ended early, and the former's requests."""
    sweep = _sweep(records)
    points = _flat(measured(records))
    return {
        "points": len(points),
        "points_declared": len(sweep.setting.arms) * len(sweep.setting.workloads),
        "points_stopped": len(sweep.points) - len(sweep.complete),
        "requests": _count(points, "requests"),
        "failed": _count(points, "failed"),
    }


def terms(records: Sequence[Item]) -> Terms:
    """What the setting says of fleets, lengths and stopping."""
    return _terms(setting(records), "records")


def averages(records: Sequence[Item]) -> list[Average]:
    """The averages of METRICS over the seeds of every measured arm and rate; one that a point lacks is left out."""
    return [
        Average(arm, rate, metric, over, len(points))
        for (arm, rate), points in measured(records).items()
        for metric, over in spread([_figures(point) for point in points]).items()
    ]


def compared(records: Sequence[Item], metric: str) -> list[Quotient]:
    """Every comparison whose arms were both measured at a rate.

    Quotients of COMPARISONS among arms with room for every adapter end in ``.full``; ``full_over_limited.<arm>`` holds
    an arm with such room against the same without.
    """
    cells = measured(records)
    pairs: dict[str, tuple[str, str]] = dict(COMPARISONS)
    for name, arms in COMPARISONS.items():
        if BASE_ONLY not in arms:
            pairs[f"{name}.full"] = f"{arms[0]}{FULL}", f"{arms[1]}{FULL}"
    for arm in dict.fromkeys(arm for arm, _ in cells):
        if Arm.parse(arm).full:
            limited = arm.removesuffix(FULL)
            pairs[f"full_over_limited.{limited}"] = arm, limited
    return [
        Quotient(name, arm, other, rate, value)
        for name, (arm, other) in pairs.items()
        for rate in dict.fromkeys(rate for _, rate in cells)
        if (value := _paired(cells.get((arm, rate), ()), cells.get((other, rate), ()), metric)) is not None
    ]


def peaks(records: Sequence[Item]) -> dict[str, float]:
    """By arm: bytes of the high-water mark of allocated memory over an engine's life, the mean over its starts."""
    found: dict[str, dict[int, int]] = {}
    for point in _flat(measured(records)):
        if point.peak_allocated_bytes is not None:
            of_arm = found.setdefault(point.arm, {})
            of_arm[point.start] = max(of_arm.get(point.start, 0), point.peak_allocated_bytes)
    return {arm: statistics.fmean(of_arm.values()) for arm, of_arm in found.items()}


def pools(records: Sequence[Item]) -> dict[str, int]:
    """By arm: the most device bytes that all its engines together held for LoRA after a point."""
    found: dict[str, int] = {}
    for point in _flat(measured(records)):
        if point.pool_bytes is not None:
            found[point.arm] = max(found.get(point.arm, 0), point.pool_bytes)
    return found


def _paired(ours: Sequence[PointRecord], others: Sequence[PointRecord], metric: str) -> float | None:
    """The geometric mean over seeds of a figure in times of another arm's; None where a point lacks it."""
    pairs = [
        (_figures(one)[metric], _figures(other)[metric]) for one, other in zip(ours, others, strict=False)
    ]
    quotients = [one / other for one, other in pairs if one and other]
    return geomean(quotients) if quotients and len(quotients) == len(pairs) else None


def _figures(point: PointRecord) -> dict[str, float | None]:
    """METRICS of a point."""
    source = point.source_bytes
    own = {"loads": point.loads, "source_gib": None if source is None else source / GIB}
    return {metric: own[metric] if metric in own else point.figures.get(metric) for metric in METRICS}


def _loads(points: Iterable[PointRecord]) -> dict[str, float]:
    """By arm: adapter loads in a timed window, the mean over all its points."""
    found: dict[str, list[int]] = {}
    for point in points:
        if point.loads is not None:
            found.setdefault(point.arm, []).append(point.loads)
    return {arm: statistics.fmean(loads) for arm, loads in found.items()}


def _count(points: Iterable[PointRecord], name: str) -> int:
    """The sum of a count over points."""
    return sum(int(point.figures.get(name) or 0) for point in points)


def _flat(cells: Mapping[Cell, Sequence[PointRecord]]) -> list[PointRecord]:
    return [point for points in cells.values() for point in points]


def _by_fleet(points: Iterable[PointRecord]) -> Summary:
    """``pool_bytes.<arm>.<fleet>``: the most device bytes that a fleet's engine held for LoRA after a point."""
    found: Summary = {}
    for point in points:
        for fleet, window in point.windows.items():
            key = f"pool_bytes.{point.arm}.{fleet}"
            found[key] = max(int(found.get(key, 0)), window.after.lora_bytes)
    return found


def _sweep(records: Sequence[Item]) -> Sweep:
    return assemble(records, "records")


def _terms(found: SettingRecord, path: str | Path) -> Terms:
    try:
        return Terms.model_validate(found.config)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, ("config", *first["loc"])))
        raise InputError(f"{key}: {first['msg']}", path=path) from error


def _check_execution(start: StartRecord, path: str | Path) -> None:
    """An arm is LoRAForge's where every engine says so, and the engine's own where none says otherwise."""
    execution = Arm.parse(start.arm).execution
    if start.failure is not None or execution is None:
        return
    for fleet, engine in start.engines.items():
        said = None if engine.counters is None else engine.counters.execution
        if said != execution and not (said is None and execution == "native"):
            raise InputError(
                f"start {start.number} of {start.arm}: the engine of {fleet} says it serves by {said or 'no'} kernels",
                path=path,
            )


def _check_requests(point: PointRecord, file: Path) -> None:
    """A point is of its requests, where their file still lies beside the records (a bag has none)."""
    if not file.is_file():
        return
    if sha256_file(file) != point.requests_file_sha256:
        raise InputError("is not what was measured", path=file, remedy="put the file back as it was")
    for key, value in figures_of(read_run(file)).items():
        if not same(point.figures.get(key), value):
            raise InputError(f"gives {key} {value}, its record says {point.figures.get(key)}", path=file)


def _check_workload(
    point: PointRecord, declared: Mapping[tuple[float, int], WorkloadHashes], path: str | Path
) -> None:
    """A point replays the workload of its rate and seed. The base model alone may be given lengths of its own: those
    that answers of another arm had, which ended by themselves (paper, section 6.4)."""
    where = f"{point.arm} at rate {point.rate:g}, seed {point.seed}"
    wanted = declared.get((point.rate, point.seed))
    if wanted is None:
        raise InputError(f"{where} is not of the declared workloads", path=path)
    names = ["requests", "requests_sha256", "arrivals_sha256"]
    names += [] if point.arm == BASE_ONLY else ["outputs_sha256", "sha256"]
    for name in names:
        if getattr(point.workload, name) != getattr(wanted, name):
            raise InputError(f"{where} replayed another workload than the declared one ({name})", path=path)
