"""The quality study: validation scores and the choice they make, then test scores of what was chosen and of baselines.

Two kinds of bag. Each holds the same selection record, so that the audit can ask of a report where its choice was made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Tag, TypeAdapter

from loraforge.config import Split
from loraforge.errors import InputError, LoraForgeError
from loraforge.evidence.targets.base import Claim, Summary, Target, at_most
from loraforge.evidence.targets.quality import (
    BASE,
    ORIGINAL,
    Arm,
    QualityTarget,
    Samples,
    Score,
    by_arm,
    samples_of,
)
from loraforge.files import canonical_json, sha256_text
from loraforge.quality.scores import count_over, macro, worst
from loraforge.quality.selection import Selection, select
from loraforge.quality.statistics import Intervals, Resampling

Record = Score | Selection
# fields that say what was scored and how it went; a list of its own, so that a new field changes no old digest
_DIGESTED = (
    *("adapter", "arm", "budget", "metric", "split", "stats"),
    *("task_sha256", "adapter_sha256", "model_sha256"),
)
CTS = ("cts", "cts-weighted", "cts-diagonal")  # arms of shared bases


@dataclass(frozen=True)
class Standing:
    """An arm among the others, in points. ``delta``: macro less that of the original adapters, with its intervals.

    ``worst``: the largest loss of one adapter, 0 where none loses, and which; ``n_over_5``: how many lose more than 5.
    """

    macro: float
    delta: float
    intervals: Intervals
    worst: float
    worst_adapter: str
    n_over_5: int


def scores_of(records: Sequence[Record]) -> list[Score]:
    """The scores among the records."""
    return [item for item in records if isinstance(item, Score)]


def selection_of(records: Sequence[Record]) -> Selection:
    """The one selection among the records. Raises InputError where there is none, or more."""
    found = [item for item in records if isinstance(item, Selection)]
    if len(found) != 1:
        raise InputError(f"holds {len(found)} selections where one is due", key="selection")
    return found[0]


def standings(records: Sequence[Record]) -> dict[Arm, Standing]:
    """Every arm against the original adapters: base, original, then the rest by name and falling budget."""
    arms = by_arm(scores_of(records))
    original = samples_of(arms[ORIGINAL])
    return {arm: _standing(samples_of(scores), original) for arm, scores in arms.items()}


def scores_digest(scores: Sequence[Score]) -> str:
    """SHA-256 of what was scored and how it went, whatever the order of the records and the time they took."""
    lines = sorted(canonical_json({name: getattr(item, name) for name in _DIGESTED}) for item in scores)
    return sha256_text("\n".join(lines))


def selection_from(
    scores: Sequence[Score], *, fleet: str, candidates: Sequence[str], decide_at: str, finalists: int
) -> Selection:
    """What validation scores decide. Raises InputError for scores of another split, UsageError as ``select`` does."""
    if odd := next((item for item in scores if item.split != "validation"), None):
        raise InputError(
            f"scores of the {odd.split} split may not choose",
            key=f"{odd.adapter}.{odd.arm}",
            remedy="score the validation split",
        )
    arms = {arm: dict(samples_of(found)) for arm, found in by_arm(scores).items()}
    if ORIGINAL not in arms:
        raise InputError("holds no scores of the original adapters", key=ORIGINAL[0])
    return select(
        arms,
        arms[ORIGINAL],
        fleet=fleet,
        scores_sha256=scores_digest(scores),
        candidates=candidates,
        decide_at=decide_at,
        finalists=finalists,
    )


@lru_cache(maxsize=1024)  # summary, tables and figures of a bag ask for the same ones
def _standing(arm: Samples, original: Samples) -> Standing:
    scores = {name: sample.score for name, sample in arm}
    before = {name: sample.score for name, sample in original}
    sizes = tuple((name, len(sample.stats)) for name, sample in original)
    name, loss = worst(scores, before)
    return Standing(
        macro=macro(scores),
        delta=macro(scores) - macro(before),
        intervals=_resampling(sizes).intervals(dict(arm), dict(original)),
        worst=loss,
        worst_adapter=name,
        n_over_5=count_over(scores, before),
    )


@lru_cache(maxsize=4)
def _resampling(sizes: tuple[tuple[str, int], ...]) -> Resampling:
    return Resampling(dict(sizes))


def _kind(value: Any) -> str:
    return str(value.get("record", "score")) if isinstance(value, dict) else "score"


class _StudyTarget(Target[Record]):
    """What both bags share.

    Keys of the summary are ``quality.ARM.BUDGET.NAME``, in points (0 to 100), where NAME is

    - ``macro``: mean over adapters of their native scores; ``delta``: the same less that of the original adapters
    - ``ci.low``, ``ci.high``: 95 % paired bootstrap interval of ``delta`` over adapters and their examples;
      ``ci.examples.…`` over the examples of these adapters, ``ci.adapters.…`` over adapters with these examples
    - ``worst``: the largest loss of one adapter, 0 where none loses; ``n_over_5``: how many lose more than 5 points
    """

    split: ClassVar[Split]
    sources: ClassVar = (
        *("activation", "allocate", "cts", "export", "factor", "fleet/train.py", "quality", "refine"),
    )
    record: ClassVar[TypeAdapter[Any]] = TypeAdapter(
        Annotated[
            Annotated[Score, Tag("score")] | Annotated[Selection, Tag("selection")], Discriminator(_kind)
        ]
    )

    def check(self, records: Sequence[Record], path: Any) -> None:
        scores = scores_of(records)
        if not scores:
            raise InputError("holds no scores", path=path)
        QualityTarget().check(scores, path)
        if odd := next((item for item in scores if item.split != self.split), None):
            raise InputError(
                f"{odd.adapter}: holds scores of the {odd.split} split, not of {self.split}", path=path
            )
        try:
            selection = selection_of(records)
        except InputError as error:
            raise InputError(error.problem, path=path) from error
        if selection.digest() != selection.sha256:
            raise InputError("its selection was changed after the scores decided", path=path)

    def summarise(self, records: Sequence[Record], fleet: str) -> Summary:
        scores, selection = scores_of(records), selection_of(records)
        originals = [item for item in scores if (item.arm, item.budget) == ORIGINAL]
        summary: Summary = {
            f"{fleet}.adapters": len(originals),
            f"{fleet}.examples": sum(item.n for item in originals),
            f"{fleet}.eval_s": sum(item.seconds for item in scores),
            "selection.policy": selection.chosen,
            "selection.finalists": ",".join(selection.finalists),
            "selection.decide_at": selection.decide_at,
            "selection.sha256": selection.sha256,
        }
        for arm, found in standings(records).items():
            key = f"quality.{arm[0]}.{arm[1]}"
            summary[f"{key}.macro"] = found.macro
            if arm == ORIGINAL:
                continue
            summary |= {
                f"{key}.delta": found.delta,
                f"{key}.worst": found.worst,
                f"{key}.n_over_5": found.n_over_5,
            }
            for name, (low, high) in (
                ("ci", found.intervals.both),
                ("ci.examples", found.intervals.examples),
                ("ci.adapters", found.intervals.adapters),
            ):
                summary |= {f"{key}.{name}.low": low, f"{key}.{name}.high": high}
        return summary

    def claims(self, records: Sequence[Record]) -> list[Claim]:
        return QualityTarget().claims(scores_of(records))

    def adapters(self, records: Sequence[Record]) -> list[str]:
        return QualityTarget().adapters(scores_of(records))

    def inputs(self, records: Sequence[Record]) -> dict[str, str]:
        return QualityTarget().inputs(scores_of(records)) | {"selection": selection_of(records).sha256}

    def original_hashes(self, records: Sequence[Record]) -> dict[str, str]:
        return QualityTarget().original_hashes(scores_of(records))


class QualitySelectionTarget(_StudyTarget):
    """``quality_selection``: validation scores of the candidates, and the selection that they make."""

    name: ClassVar = "quality_selection"
    figures: ClassVar = ("selection",)
    split: ClassVar = "validation"

    def claims(self, records: Sequence[Record]) -> list[Claim]:
        stated, scores = selection_of(records), scores_of(records)
        try:
            again = selection_from(
                scores,
                fleet=stated.fleet,
                # all that were scored there: a selection cannot leave out what would have won
                candidates=sorted({item.arm for item in scores if item.budget == stated.decide_at}),
                decide_at=stated.decide_at,
                finalists=len(stated.finalists),
            )
            differs = not again.confirms(stated)
        except LoraForgeError:
            differs = True
        return [
            *super().claims(records),
            at_most("selections that differ from what the scores decide", int(differs), 0),
        ]


class QualityStudyTarget(_StudyTarget):
    """``quality_study``: test scores of the finalists and of the baselines.

    Beside the keys of each arm, ``reach.NAME`` has those of the chosen policy at the budget where it was chosen:
    ``drop``, ``worst`` and ``n_over_5``, and as ratios where both are losses ``drop_over_spectral``,
    ``worst_over_uniform`` and ``cts_drop_over_drop`` (of the best variant).
    """

    name: ClassVar = "quality_study"
    figures: ClassVar = ("retention", "regressions", "budget_share", "quality_tables")
    split: ClassVar = "test"

    def summarise(self, records: Sequence[Record], fleet: str) -> Summary:
        return super().summarise(records, fleet) | reach(standings(records), selection_of(records))

    def claims(self, records: Sequence[Record]) -> list[Claim]:
        selection = selection_of(records)
        arms = standings(records)
        missing = sum((policy, selection.decide_at) not in arms for policy in selection.finalists)
        return [*super().claims(records), at_most("finalists without test scores", missing, 0)]


def reach(arms: dict[Arm, Standing], selection: Selection) -> Summary:
    """How far the chosen policy got at the budget where it was chosen; see :class:`QualityStudyTarget`."""
    at = selection.decide_at
    best = arms.get((selection.chosen, at))
    if best is None:
        return {}
    drop = 0.0 - best.delta  # 0.0 where nothing is lost, not -0.0
    found: Summary = {"reach.drop": drop, "reach.worst": best.worst, "reach.n_over_5": best.n_over_5}
    spectral, uniform = arms.get(("spectral", at)), arms.get(("uniform", at))
    shared = [-arms[name, at].delta for name in CTS if (name, at) in arms]
    if spectral is not None and spectral.delta < 0:
        found["reach.drop_over_spectral"] = drop / -spectral.delta
    if uniform is not None and uniform.worst > 0:
        found["reach.worst_over_uniform"] = best.worst / uniform.worst
    if shared and drop > 0:
        found["reach.cts_drop_over_drop"] = min(shared) / drop
    return found


__all__ = ["BASE", "ORIGINAL", "QualitySelectionTarget", "QualityStudyTarget", "Record", "Standing"]
