"""Scale: seconds and peak memory of planning a fleet, by its number of adapters, and what a change of it costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter, model_validator

from loraforge.errors import InputError
from loraforge.evidence.targets.base import Claim, Record, Summary, Target, at_most
from loraforge.evidence.targets.spectra import MAX_ACTION_ERROR, MAX_SPECTRUM_ERROR

StepName = Literal["factor", "resume", "allocate", "rebudget", "add", "remove"]
STEPS: tuple[StepName, ...] = ("factor", "resume", "allocate", "rebudget", "add", "remove")
MAX_GROWTH_MIB = 0.5  # of peak memory by an adapter: metadata, not factors

Gib = Annotated[float, Field(gt=0)]
Error = Annotated[float, Field(ge=0)]


class Run(Record):
    """The synthetic adapters, alike but for their values, and the threads that factorised them."""

    record: Literal["run"]
    base_model: str
    rank: int = Field(ge=1)
    modules: int = Field(ge=1, description="of an adapter")
    parameters: int = Field(ge=1, description="of an adapter")
    threads: int = Field(ge=1)


class Step(Record):
    """One process.

    ``fleet`` is how many adapters it planned: those there are, one more or one less; ``read`` of them it opened, and
    ``factorised`` so many. ``seconds`` is the sum of ``stages``, from imported modules to its results; ``cpu_s`` what
    its threads worked meanwhile, whatever else the machine did; ``baseline_gib`` its memory before, ``peak_gib`` the
    most it had. ``resume``: of ``lost`` entries, a process that was killed had built ``done_when_killed``.
    """

    adapters: int = Field(ge=2)
    step: StepName
    fleet: int = Field(ge=1)
    read: int = Field(ge=0)
    factorised: int = Field(ge=0)
    seconds: float = Field(gt=0)
    cpu_s: float = Field(gt=0)
    stages: dict[str, Annotated[float, Field(ge=0)]]
    baseline_gib: Gib
    peak_gib: Gib
    max_action_error: Error
    max_spectrum_error: Error
    ceiling: int | None = Field(None, ge=1)
    spent: int | None = Field(None, ge=1)
    lost: int | None = Field(None, ge=1)
    done_when_killed: int | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _of_its_kind(self) -> Step:
        if (self.step == "resume") != (self.lost is not None and self.done_when_killed is not None):
            raise ValueError("lost and done_when_killed are those of a run that resumes")
        if (self.step in ("factor", "resume")) != (self.ceiling is None or self.spent is None):
            raise ValueError("ceiling and spent are those of an allocation")
        if self.peak_gib < self.baseline_gib:
            raise ValueError("the peak is below the baseline")
        return self

    @property
    def due(self) -> int:
        """How many adapters this step must factorise: no more, and no fewer."""
        if self.step == "resume":
            return (self.lost or 0) - (self.done_when_killed or 0)
        return {"factor": self.adapters, "add": 1}.get(self.step, 0)


Item = Step | Run


def _kind(value: Any) -> str:
    return str(value.get("record", "step")) if isinstance(value, dict) else "step"


class ScaleTarget(Target[Item]):
    """``scale``: one run, and every step of every size of fleet."""

    name: ClassVar = "scale"
    figures: ClassVar = ("scale",)
    sources: ClassVar = ("factor", "allocate", "fleet", "bench/scale.py")
    record: ClassVar[TypeAdapter[Any]] = TypeAdapter(
        Annotated[Annotated[Step, Tag("step")] | Annotated[Run, Tag("run")], Discriminator(_kind)]
    )

    def check(self, records: Sequence[Item], path: Any) -> None:
        runs = sum(isinstance(item, Run) for item in records)
        if runs != 1:
            raise InputError("states its run twice" if runs else "does not hold its run", path=path)
        found = by_size(records)
        if not found:
            raise InputError("holds no step", path=path)
        if sum(map(len, found.values())) + 1 != len(records):
            raise InputError("states a step twice", path=path)
        for size, steps in found.items():
            if lost := [name for name in STEPS if name not in steps]:
                raise InputError(f"{size} adapters: lacks the step {lost[0]}", path=path)
            planned = {"add": size + 1, "remove": size - 1}
            if odd := [name for name, item in steps.items() if item.fleet != planned.get(name, size)]:
                raise InputError(f"{size} adapters: {odd[0]} planned another fleet", path=path)

    def summarise(self, records: Sequence[Item], fleet: str) -> Summary:
        run, found = run_of(records), by_size(records)
        summary: Summary = {
            "rank": run.rank,
            "modules": run.modules,
            "parameters": run.parameters,
            "threads": run.threads,
        }
        for size, steps in found.items():
            key = f"adapters_{size}"
            summary |= {
                f"{key}.modules": size * run.modules,
                f"{key}.factor_s": steps["factor"].seconds,
                f"{key}.factor_cpu_s": steps["factor"].cpu_s,
                f"{key}.peak_gib": peak(steps),
                f"{key}.baseline_gib": steps["factor"].baseline_gib,
                f"{key}.allocate_s": steps["allocate"].seconds,
                f"{key}.choice_s": steps["allocate"].stages["allocate"],
                f"{key}.add_one_s": steps["add"].seconds,
                f"{key}.remove_one_s": steps["remove"].seconds,
                f"{key}.rebudget_s": steps["rebudget"].seconds,
                f"{key}.add_one_cpu_s": steps["add"].cpu_s,
                f"{key}.remove_one_cpu_s": steps["remove"].cpu_s,
                f"{key}.rebudget_cpu_s": steps["rebudget"].cpu_s,
                f"{key}.add_one_factorised": steps["add"].factorised,
                f"{key}.remove_one_factorised": steps["remove"].factorised,
                f"{key}.rebudget_factorised": steps["rebudget"].factorised,
            }
        largest = max(found)
        for name in ("add_one_s", "remove_one_s", "rebudget_s"):
            summary[name] = summary[f"adapters_{largest}.{name}"]
        summary["peak_mib_an_adapter"] = growth(found)
        return summary

    def claims(self, records: Sequence[Item]) -> list[Claim]:
        found = by_size(records)
        items = [item for steps in found.values() for item in steps.values()]
        counted = [
            at_most(
                f"difference of factorised and due adapters, {item.step} of {item.adapters}",
                abs(item.factorised - item.due),
                0,
            )
            for item in items
        ]
        spent = [
            at_most(f"parameters spent, {item.step} of {item.adapters}", item.spent, item.ceiling)
            for item in items
            if item.spent is not None and item.ceiling is not None
        ]
        return [
            *counted,
            *spent,
            at_most("MiB that peak memory grows by an adapter", growth(found), MAX_GROWTH_MIB),
            at_most("relative action error", max(item.max_action_error for item in items), MAX_ACTION_ERROR),
            at_most(
                "relative spectrum error", max(item.max_spectrum_error for item in items), MAX_SPECTRUM_ERROR
            ),
        ]

    def adapters(self, records: Sequence[Item]) -> list[str]:
        return []


def run_of(records: Sequence[Item]) -> Run:
    """The run among the records."""
    return next(item for item in records if isinstance(item, Run))


def by_size(records: Sequence[Item]) -> dict[int, dict[str, Step]]:
    """Steps by name, by the number of adapters, ascending."""
    found: dict[int, dict[str, Step]] = {}
    for item in records:
        if isinstance(item, Step):
            found.setdefault(item.adapters, {}).setdefault(item.step, item)
    return dict(sorted(found.items()))


def peak(steps: dict[str, Step]) -> float:
    """GiB, the most that any step of a fleet had."""
    return max(item.peak_gib for item in steps.values())


def growth(found: dict[int, dict[str, Step]]) -> float:
    """MiB by which the peak grows with an adapter, from the smallest fleet to the largest; 0 for one size."""
    least, most = min(found), max(found)
    if least == most:
        return 0.0
    return max(0.0, (peak(found[most]) - peak(found[least])) * 1024 / (most - least))
