"""Targets of serving experiments: which records of ``loraforge bench sweep`` are evidence, and of what.

Which engine served is in the records alone: the same study in another engine is another bag of the same target, under a
host's label that names the engine (``sglang-h200``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import TypeAdapter

from loraforge.errors import InputError
from loraforge.evidence.tables import same
from loraforge.evidence.targets.base import Claim, Summary, Target, at_most
from loraforge.evidence.targets.serving_study import Item, Study, count, studies, study
from loraforge.files import sha256_file
from loraforge.serving.arms import BASE_ONLY, Arm
from loraforge.serving.metrics import summarise as figures_of
from loraforge.serving.points import PointRecord, StartRecord, SweepRecord, WorkloadHashes
from loraforge.serving.records import read_run

MAX_FAILED = 0.01  # of the requests: beyond it a throughput is of other work than the one declared


class ServingTarget(Target[Item]):
    """Base of the studies: one setting, points with all declared seeds, the same workload for every arm."""

    sources: ClassVar = ("serving", "runtime", "ops", "dispatch", "jit.py")
    record: ClassVar[TypeAdapter[Any]] = TypeAdapter(SweepRecord)
    also: ClassVar[tuple[str, ...]] = ()  # other experiments whose records say the same

    def check(self, records: Sequence[Item], path: str | Path) -> None:
        found = studies(records, path)
        if len(found) > 1:
            raise InputError("states the setting twice", path=path)
        self.check_study(found[0])

    def check_study(self, found: Study) -> None:
        """Raise InputError where the records of one experiment are no evidence."""
        path = found.path
        if found.setting.experiment not in (self.name, *self.also):
            raise InputError(f"is an experiment {found.setting.experiment!r}, no {self.name}", path=path)
        _ = found.terms
        for start in found.sweep.starts:
            _check_execution(start, path)
        declared = {(load.rate, load.seed): load for load in found.setting.workloads}
        for point in found.sweep.points:
            _check_workload(point, declared, found)
            _check_requests(point, Path(path).parent / point.requests)
        if not found.measured:
            raise InputError("has no arm with every declared seed of a rate", path=path)

    def summarise(self, records: Sequence[Item], fleet: str) -> Summary:
        return study(records).summary()

    def claims(self, records: Sequence[Item]) -> list[Claim]:
        points = [point for found in studies(records) for point in found.points]
        return [
            at_most(
                "share of an averaged point's requests that failed",
                max(count([point], "failed") / count([point], "requests") for point in points),
                MAX_FAILED,
            )
        ]

    def adapters(self, records: Sequence[Item]) -> list[str]:
        return []  # a shape fleet's are in no lock

    def inputs(self, records: Sequence[Item]) -> dict[str, str]:
        return _inputs(study(records))

    def original_hashes(self, records: Sequence[Item]) -> dict[str, str]:
        fleets = [fleet for found in studies(records) for fleet in found.setting.adapters.values()]
        return {name: digest for fleet in fleets for name, digest in fleet.get("original", {}).items()}


class MixedServingVllm(ServingTarget):
    """``mixed_serving_vllm``: both fleets on one device under byte budgets, over offered rates (Fig. 12, B.1)."""

    name: ClassVar = "mixed_serving_vllm"
    figures: ClassVar = ("mixed_serving_vllm",)


class MixedServingSglang(ServingTarget):
    """``mixed_serving_sglang``: the same in SGLang (Fig. 6, Table 7, B.9)."""

    name: ClassVar = "mixed_serving_sglang"
    figures: ClassVar = ("mixed_serving_sglang", "mixed_serving_sglang_table")


class SixCell(ServingTarget):
    """``six_cell``: weights by execution on one fleet, lengths, KV and resident adapters alike (Fig. 7, Table 3)."""

    name: ClassVar = "six_cell"
    figures: ClassVar = ("six_cell", "six_cell_table")


class FixedWork(ServingTarget):
    """``fixed_work``: the deployed arms with equal output counts and their loads (Fig. 16, Table 4, B.5).

    Where every answer of a mixed experiment is of a declared length, as with shape fleets, it is fixed work itself.
    """

    name: ClassVar = "fixed_work"
    figures: ClassVar = ("fixed_work", "fixed_work_table")
    also: ClassVar = ("mixed_serving_vllm", "mixed_serving_sglang")

    def check_study(self, found: Study) -> None:
        super().check_study(found)
        if "natural" in (found.terms.stops or (found.terms.stop,)):
            raise InputError(
                "has answers that end by themselves, which are no fixed work",
                path=found.path,
                key="config.stop",
            )


class Residency(ServingTarget):
    """``residency``: weights by execution by room for some or for all adapters (Fig. 8)."""

    name: ClassVar = "residency"
    figures: ClassVar = ("residency",)


class StoppingContract(ServingTarget):
    """``stopping_contract``: the same points with answers that end in several ways, and what schedulers admitted
    (Table 6, B.7)."""

    name: ClassVar = "stopping_contract"
    figures: ClassVar = ("stopping_contract",)

    def check_study(self, found: Study) -> None:
        super().check_study(found)
        if len(found.terms.contracts) < 2:
            raise InputError("has one way to end answers", path=found.path, key="config.stops")
        for point in found.points:
            if missing := found.terms.fleets.keys() - point.admission.keys():
                raise InputError(
                    f"{point.case} at rate {point.rate:g}, seed {point.seed} has no admissions of {min(missing)}",
                    path=found.path,
                )


class SingleFleet(ServingTarget):
    """``single_fleet``: each fleet alone, an experiment a fleet, over offered rates (Fig. 19, Table 9)."""

    name: ClassVar = "single_fleet"
    figures: ClassVar = ("single_fleet", "single_fleet_table")

    def check(self, records: Sequence[Item], path: str | Path) -> None:
        found = studies(records, path)
        for one in found:
            if len(one.terms.fleets) > 1:
                raise InputError("serves several fleets at once", path=path, key="config.fleets")
        fleets = [fleet_of(one) for one in found]
        if twice := [name for name in fleets if fleets.count(name) > 1]:
            raise InputError(f"states the setting of {twice[0]} twice", path=path)
        for one in found:
            self.check_study(one)
        if len({one.setting.engine for one in found}) > 1:
            raise InputError("is of several engines", path=path, key="engine")

    def summarise(self, records: Sequence[Item], fleet: str) -> Summary:
        """``<fleet>.<key>``, and what counts all fleets together."""
        found = studies(records)
        summary: Summary = {"engine": found[0].setting.engine}
        for key in found[0].counts:
            summary[key] = sum(one.counts[key] for one in found)
        for one in found:
            summary |= {
                f"{fleet_of(one)}.{key}": value for key, value in one.summary().items() if key != "engine"
            }
        return summary

    def inputs(self, records: Sequence[Item]) -> dict[str, str]:
        return {
            f"{fleet_of(one)}/{name}": digest
            for one in studies(records)
            for name, digest in _inputs(one).items()
        }


class Adapters500(ServingTarget):
    """``adapters_500``: ten names of each adapter, all of them resident, against one (no figure of the paper's)."""

    name: ClassVar = "adapters_500"
    figures: ClassVar = ("adapters_500",)

    def summarise(self, records: Sequence[Item], fleet: str) -> Summary:
        """With ``adapters_500.ratio``: output tokens a second over those of one name an adapter, at the highest rate
        that has both."""
        summary = super().summarise(records, fleet)
        found = [its for its in study(records).compared("tok_s") if its.name.startswith("copies.")]
        if found:
            summary["adapters_500.ratio"] = max(found, key=lambda its: its.rate).value
        return summary


class NaturalServing(ServingTarget):
    """``natural_serving``: real adapters and prompts on a GPU, answers that end by themselves, over offered rates."""

    name: ClassVar = "natural_serving"
    figures: ClassVar = ("natural_serving",)


class CpuServing(ServingTarget):
    """``cpu_serving``: real adapters and prompts on a processor, over offered rates."""

    name: ClassVar = "cpu_serving"
    figures: ClassVar = ("cpu_serving",)


def fleet_of(found: Study) -> str:
    """The fleet of an experiment that has one."""
    return next(iter(found.terms.fleets))


def _inputs(found: Study) -> dict[str, str]:
    return {f"workloads/{load.rate:g}-{load.seed}": load.sha256 for load in found.setting.workloads}


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
    point: PointRecord, declared: Mapping[tuple[float, int], WorkloadHashes], found: Study
) -> None:
    """A point replays the workload of its rate and seed. Lengths of its own may have what repeats answers that ended by
    themselves: the base model alone (paper, section 6.4), and every way but the natural one of several."""
    where = f"{point.case} at rate {point.rate:g}, seed {point.seed}"
    wanted = declared.get((point.rate, point.seed))
    if wanted is None:
        raise InputError(f"{where} is not of the declared workloads", path=found.path)
    repeats = point.arm == BASE_ONLY if point.stop is None else "natural" in found.terms.contracts
    names = ["requests", "requests_sha256", "arrivals_sha256"]
    names += [] if repeats and point.stop != "natural" else ["outputs_sha256", "sha256"]
    for name in names:
        if getattr(point.workload, name) != getattr(wanted, name):
            raise InputError(
                f"{where} replayed another workload than the declared one ({name})", path=found.path
            )
