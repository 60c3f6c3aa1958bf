"""What is computed from the records of one serving experiment, assembled once: averages, quotients, memory, counts.

Averages are over seeds, of quantiles within a run (paper, Table 3); quotients are geometric means over paired seeds
(section 6.5). What is compared is a *case*: an arm, and how its answers ended where an experiment has several ways.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from loraforge.errors import InputError
from loraforge.evidence.targets.base import Summary
from loraforge.evidence.targets.kernels import geomean
from loraforge.serving.arms import BASE_ONLY, Arm
from loraforge.serving.metrics import Spread, spread
from loraforge.serving.points import (
    Admission,
    PointRecord,
    SettingRecord,
    StartRecord,
    Sweep,
    assemble,
    case_of,
)
from loraforge.serving.records import Stop
from loraforge.serving.workload import Lengths

GIB = 2**30
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
# of what schedulers admitted, where it was traced: averaged too, by fleet
ADMISSION = (
    "prefill_tokens_mean",
    "prefill_requests_mean",
    "decode_requests_mean",
    "decode_requests_peak",
    "running_peak",
    "waiting_peak",
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
Cell = tuple[str, float]  # case and offered rate


@dataclass(frozen=True)
class Average:
    """A figure of one case at one rate: mean and sample standard deviation (None of one) over ``seeds``. fleet: whose,
    None for that of all together."""

    case: str
    rate: float
    metric: str
    over: Spread
    seeds: int
    fleet: str | None = None


@dataclass(frozen=True)
class Quotient:
    """A figure of ``case`` in times of that of ``other`` at one rate, the geometric mean over paired seeds."""

    name: str
    case: str
    other: str
    rate: float
    value: float


class FleetTerms(BaseModel):
    """What a figure has to say of one fleet."""

    output_tokens: Lengths
    vocabulary: dict[str, Any] | None = Field(None, description="given where prompts are drawn token ids")
    budget_gib: float | None = None
    cap_tokens: int | None = None
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
    stops: tuple[Stop, ...] | None = None
    lengths_of: str | None = None
    decode_steps: int = 0

    @property
    def contracts(self) -> tuple[Stop | None, ...]:
        """Ways to end answers that cases are told apart by; None where there is one."""
        return self.stops or (None,)


@dataclass(frozen=True)
class Study:
    """One experiment. path: names the records in errors."""

    sweep: Sweep
    path: str | Path = "records"

    @property
    def setting(self) -> SettingRecord:
        """What the experiment is."""
        return self.sweep.setting

    @cached_property
    def terms(self) -> Terms:
        """What the setting says of fleets, lengths and stopping. Raises InputError where it does not say it."""
        try:
            return Terms.model_validate(self.setting.config)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, ("config", *first["loc"])))
            raise InputError(f"{key}: {first['msg']}", path=self.path) from error

    @cached_property
    def measured(self) -> dict[Cell, tuple[PointRecord, ...]]:
        """Points by case and rate, by seed, of those that have every seed that the setting declares for the rate.

        What ended early does not count, and what lacks a seed is no average (paper B.5 leaves such points out too).
        """
        found: dict[Cell, dict[int, PointRecord]] = {}
        for point in self.sweep.complete:
            found.setdefault((point.case, point.rate), {})[point.seed] = point
        seeds: dict[float, list[int]] = {}
        for load in self.setting.workloads:
            seeds.setdefault(load.rate, []).append(load.seed)
        return {
            (case, rate): tuple(found[case, rate][seed] for seed in sorted(wanted))
            for case in self._declared_cases
            for rate, wanted in seeds.items()
            if set(wanted) <= found.get((case, rate), {}).keys()
        }

    @cached_property
    def points(self) -> list[PointRecord]:
        """All that are averaged."""
        return [point for points in self.measured.values() for point in points]

    @property
    def cases(self) -> list[str]:
        """Those that have an average, in the order of the arms."""
        return list(dict.fromkeys(case for case, _ in self.measured))

    @property
    def rates(self) -> list[float]:
        """Those that have an average."""
        return list(dict.fromkeys(rate for _, rate in self.measured))

    @property
    def counts(self) -> dict[str, int]:
        """Points that averages are of, those declared and those that ended early, and the former's requests."""
        return {
            "points": len(self.points),
            "points_declared": len(self._declared_cases) * len(self.setting.workloads),
            "points_stopped": len(self.sweep.points) - len(self.sweep.complete),
            "requests": count(self.points, "requests"),
            "failed": count(self.points, "failed"),
        }

    @cached_property
    def averages(self) -> list[Average]:
        """The averages of METRICS over the seeds of every measured case and rate; one that a point lacks is left
        out."""
        return [
            Average(case, rate, metric, over, len(points))
            for (case, rate), points in self.measured.items()
            for metric, over in spread([_figures(point) for point in points]).items()
        ]

    @cached_property
    def admissions(self) -> list[Average]:
        """The averages of ADMISSION, by fleet; none where no scheduler was traced."""
        found = []
        for (case, rate), points in self.measured.items():
            for fleet in points[0].admission:
                values = [_admission(point.admission[fleet]) for point in points]
                found += [
                    Average(case, rate, metric, over, len(points), fleet)
                    for metric, over in spread(values).items()
                ]
        return found

    def compared(self, metric: str) -> list[Quotient]:
        """Every comparison whose cases were both measured at a rate.

        Quotients of COMPARISONS among arms with room for every adapter end in ``.full``; ``full_over_limited.<arm>``
        holds an arm with such room against the same without, ``copies.<arm>`` one with several names an adapter against
        the same with one. Where answers end in several ways, names end in the way (``.exact``), and ``<way>_over_<first
        way>.<arm>`` holds each against the first.
        """
        cells = self.measured
        return [
            Quotient(name, case, other, rate, value)
            for name, (case, other) in self._pairs().items()
            for rate in self.rates
            if (value := _paired(cells.get((case, rate), ()), cells.get((other, rate), ()), metric))
            is not None
        ]

    @cached_property
    def peaks(self) -> dict[str, float]:
        """By arm: bytes of the high-water mark of allocated memory over an engine's life, the mean over its starts."""
        found: dict[str, dict[int, int]] = {}
        for point in self.points:
            if point.peak_allocated_bytes is not None:
                of_arm = found.setdefault(point.arm, {})
                of_arm[point.start] = max(of_arm.get(point.start, 0), point.peak_allocated_bytes)
        return {arm: statistics.fmean(of_arm.values()) for arm, of_arm in found.items()}

    @cached_property
    def pools(self) -> dict[str, int]:
        """By arm: the most device bytes that all its engines together held for LoRA after a point."""
        found: dict[str, int] = {}
        for point in self.points:
            if point.pool_bytes is not None:
                found[point.arm] = max(found.get(point.arm, 0), point.pool_bytes)
        return found

    @cached_property
    def loads(self) -> dict[str, float]:
        """By arm: adapter loads in a timed window, the mean over all its points."""
        found: dict[str, list[int]] = {}
        for point in self.points:
            if point.loads is not None:
                found.setdefault(point.arm, []).append(point.loads)
        return {arm: statistics.fmean(loads) for arm, loads in found.items()}

    def summary(self) -> Summary:
        """All of this under flat keys."""
        found: Summary = {
            "engine": self.setting.engine,
            "seeds": len({load.seed for load in self.setting.workloads}),
        }
        found |= self.counts
        for average in (*self.averages, *self.admissions):
            key = f"{average.metric}.{average.case}.{average.rate:g}"
            key += f".{average.fleet}" if average.fleet else ""
            found[key] = average.over.mean
            if average.over.std is not None:
                found[f"{key}.std"] = average.over.std
        for prefix, metric in (("ratio", "tok_s"), ("tpot_ratio", "tpot_p99_ms")):
            for quotient in self.compared(metric):
                found[f"{prefix}.{quotient.name}.{quotient.rate:g}"] = quotient.value
        found |= {f"loads.{arm}": loads for arm, loads in self.loads.items()}
        found |= {f"pool_bytes.{arm}": held for arm, held in self.pools.items()}
        found |= {f"peak_gib.{arm}": peak / GIB for arm, peak in self.peaks.items()}
        return found | _by_fleet(self.points)

    @property
    def _declared_cases(self) -> list[str]:
        """What is to be measured; the base model has no natural answers of its own where others end by themselves."""
        contracts = self.terms.contracts
        return [
            case_of(arm, stop)
            for arm in self.setting.arms
            for stop in contracts
            if not (stop == "natural" and arm == BASE_ONLY and len(contracts) > 1)
        ]

    def _pairs(self) -> dict[str, tuple[str, str]]:
        pairs: dict[str, tuple[str, str]] = {}
        contracts = self.terms.contracts
        for stop in contracts:
            end = f".{stop}" if stop else ""
            for name, (arm, other) in COMPARISONS.items():
                pairs[name + end] = case_of(arm, stop), case_of(other, stop)
                if BASE_ONLY not in (arm, other):
                    pairs[f"{name}.full{end}"] = case_of(f"{arm}_full", stop), case_of(f"{other}_full", stop)
            for own in map(Arm.parse, self.setting.arms):
                case = case_of(own.name, stop)
                if own.full:
                    pairs[f"full_over_limited.{own.limited}{end}"] = case, case_of(own.limited.name, stop)
                if own.copies > 1:
                    pairs[f"copies.{own.single}{end}"] = case, case_of(own.single.name, stop)
                if stop != contracts[0]:
                    pairs[f"{stop}_over_{contracts[0]}.{own}"] = case, case_of(own.name, contracts[0])
        return pairs


def study(records: Sequence[Item], path: str | Path = "records") -> Study:
    """The one experiment that records are of. Raises InputError where they contradict each other."""
    return Study(assemble(records, path), path)


def studies(records: Sequence[Item], path: str | Path = "records") -> list[Study]:
    """The experiments of records that lie one after the other. Raises InputError as :func:`study` does."""
    parts: list[list[Item]] = []
    for record in records:
        if isinstance(record, SettingRecord) or not parts:
            parts.append([])
        parts[-1].append(record)
    return [study(part, path) for part in parts]


def count(points: Iterable[PointRecord], name: str) -> int:
    """The sum of a count over points."""
    return sum(int(point.figures.get(name) or 0) for point in points)


def _paired(ours: Sequence[PointRecord], others: Sequence[PointRecord], metric: str) -> float | None:
    """The geometric mean over seeds of a figure in times of another case's; None where a point lacks it."""
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


def _admission(found: Admission) -> Mapping[str, float | None]:
    return {metric: getattr(found, metric) for metric in ADMISSION}


def _by_fleet(points: Iterable[PointRecord]) -> Summary:
    """``pool_bytes.<arm>.<fleet>``: the most device bytes that a fleet's engine held for LoRA after a point."""
    found: Summary = {}
    for point in points:
        for fleet, window in point.windows.items():
            key = f"pool_bytes.{point.arm}.{fleet}"
            found[key] = max(int(found.get(key, 0)), window.after.lora_bytes)
    return found
