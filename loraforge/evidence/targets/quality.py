"""Quality: native task scores of base, original and compressed adapters, with per-example statistics."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any, ClassVar

from pydantic import Field, TypeAdapter, model_validator

from loraforge.config import Split
from loraforge.errors import InputError
from loraforge.evidence.targets.base import Claim, Record, Summary, Target, at_most
from loraforge.quality.metrics import METRICS, aggregate
from loraforge.quality.scores import Sample
from loraforge.quality.scores import macro as mean
from loraforge.quality.statistics import Comparison, compare

Arm = tuple[str, str]  # arm, budget
ORIGINAL: Arm = ("original", "1")
BASE: Arm = ("base", "0")
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Score(Record):
    """One adapter's task under one arm; ``stats`` is what the metric needs of each example, in their order.

    ``parameters``: compact ones that the arm leaves the adapter; None where bases are shared, and in records that do
    not state them.
    """

    adapter: str
    task: str
    split: Split = "test"
    parameters: int | None = Field(None, ge=0)
    metric: str
    arm: str
    budget: str
    score: float = Field(ge=0, le=100)
    n: int = Field(ge=1)
    stats: list[list[float]]
    task_sha256: Sha256
    adapter_sha256: Sha256 | None
    model_sha256: Sha256
    seconds: float = Field(ge=0)

    @model_validator(mode="after")
    def _complete(self) -> Score:
        if len(self.stats) != self.n:
            raise ValueError(f"stats of {len(self.stats)} examples where n is {self.n}")
        if len({len(stat) for stat in self.stats}) > 1 or not self.stats[0]:
            raise ValueError("stats differ in length")
        if self.metric not in METRICS:
            raise ValueError(f"no such metric; known are {', '.join(METRICS)}")
        if len(self.stats[0]) != (3 if self.metric == "field_f1" else 1):
            raise ValueError(
                f"stats hold {len(self.stats[0])} numbers an example, which {self.metric} does not"
            )
        Fraction(self.budget)
        return self


class QualityTarget(Target[Score]):
    """``quality``: one Score for each adapter under each arm and budget.

    Keys of the summary are ``quality.ARM.BUDGET.NAME``, in points (0 to 100), where NAME is

    - ``macro``: mean over adapters of their native scores
    - ``delta``: macro less that of the original adapters, and ``ci_low``, ``ci_high``: the 95 % paired bootstrap
      interval of this difference, not of ``macro``
    - ``worst_regression``: the largest loss of one adapter against original, 0 where none loses
    - ``over5``: how many adapters lose more than 5 points
    """

    name: ClassVar = "quality"
    figures: ClassVar = ("quality",)
    sources: ClassVar = ("quality",)
    record: ClassVar[TypeAdapter[Any]] = TypeAdapter(Score)

    def check(self, records: Sequence[Score], path: Any) -> None:
        arms = by_arm(records)
        for arm in (BASE, ORIGINAL):
            if arm not in arms:
                raise InputError(f"holds no scores of {arm[0]} at budget {arm[1]}", path=path)
        if sum(len(scores) for scores in arms.values()) != len(records):
            raise InputError("states an adapter twice under one arm", path=path)
        original = arms[ORIGINAL]
        for arm, scores in arms.items():
            if scores.keys() != original.keys():
                raise InputError(f"{arm[0]} at {arm[1]} and original differ in adapters", path=path)
            for adapter, item in scores.items():
                other = original[adapter]
                if (item.task, item.metric, item.n, item.task_sha256) != (
                    other.task,
                    other.metric,
                    other.n,
                    other.task_sha256,
                ):
                    raise InputError(
                        f"{adapter}: {arm[0]} at {arm[1]} and original were not scored on the same examples",
                        path=path,
                    )
        if len({item.model_sha256 for item in records}) != 1:
            raise InputError("holds scores on more than one base model", path=path)

    def summarise(self, records: Sequence[Score], fleet: str) -> Summary:
        arms = by_arm(records)
        summary: Summary = {
            f"{fleet}.adapters": len(arms[ORIGINAL]),
            f"{fleet}.examples": sum(item.n for item in arms[ORIGINAL].values()),
            f"{fleet}.eval_s": sum(item.seconds for item in records),
        }
        for arm in arms:
            key = f"quality.{arm[0]}.{arm[1]}"
            summary[f"{key}.macro"] = macro(arms[arm])
            if arm != ORIGINAL:
                found = versus_original(arms, arm)
                summary |= {
                    f"{key}.delta": found.delta,
                    f"{key}.ci_low": found.ci_low,
                    f"{key}.ci_high": found.ci_high,
                    f"{key}.worst_regression": found.worst_regression,
                    f"{key}.over5": found.over5,
                }
        return summary

    def claims(self, records: Sequence[Score]) -> list[Claim]:
        worst = max(abs(item.score - aggregate(item.metric, item.stats)) for item in records)
        return [at_most("difference of stated and aggregated scores, in points", worst, 0.01)]

    def adapters(self, records: Sequence[Score]) -> list[str]:
        return sorted({item.adapter for item in records})

    def inputs(self, records: Sequence[Score]) -> dict[str, str]:
        return {f"tasks/{item.task}": item.task_sha256 for item in records} | {
            "model": records[0].model_sha256
        }

    def original_hashes(self, records: Sequence[Score]) -> dict[str, str]:
        return {
            item.adapter: item.adapter_sha256
            for item in records
            if (item.arm, item.budget) == ORIGINAL and item.adapter_sha256
        }


def by_arm(records: Sequence[Score]) -> dict[Arm, dict[str, Score]]:
    """Scores by arm and adapter: base, original, then the rest by policy and falling budget."""
    found: dict[Arm, dict[str, Score]] = {}
    for item in records:
        found.setdefault((item.arm, item.budget), {})[item.adapter] = item
    first = {BASE: 0, ORIGINAL: 1}
    order = sorted(found, key=lambda arm: (first.get(arm, 2), arm[0], -Fraction(arm[1])))
    return {arm: found[arm] for arm in order}


def macro(scores: dict[str, Score]) -> float:
    """Mean over adapters of their native scores, from the examples."""
    return mean({adapter: sample.score for adapter, sample in samples_of(scores)})


def versus_original(arms: dict[Arm, dict[str, Score]], arm: Arm) -> Comparison:
    """An arm against the original adapters, paired by example, with a seeded bootstrap interval."""
    return _compare(samples_of(arms[arm]), samples_of(arms[ORIGINAL]))


Samples = tuple[tuple[str, Sample], ...]


def samples_of(scores: dict[str, Score]) -> Samples:
    """Scores by adapter as hashable samples."""
    return tuple(
        (adapter, Sample(item.metric, tuple(map(tuple, item.stats)))) for adapter, item in scores.items()
    )


@lru_cache(maxsize=256)  # the summary, the table and the drawn figure of a bag ask for the same bootstraps
def _compare(arm: Samples, original: Samples) -> Comparison:
    return compare(dict(arm), dict(original))
