"""Scores of a fleet: one number an adapter from per-example statistics, and what a policy loses by it. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loraforge.errors import UsageError
from loraforge.quality.metrics import aggregate

NOTABLE_LOSS = 5.0  # points; the paper counts adapters that lose more than this


@dataclass(frozen=True)
class Scored:
    """One adapter's task under one arm: its metric and the metric's statistics of every example, in order."""

    metric: str
    stats: Sequence[Sequence[float]]

    @property
    def score(self) -> float:
        """The task's own score, 0 to 100."""
        return aggregate(self.metric, self.stats)


def macro(scores: Mapping[str, float]) -> float:
    """Mean over adapters, each with one vote, in points."""
    if not scores:
        raise UsageError("no scores to average")
    return sum(scores.values()) / len(scores)


def losses(scores: Mapping[str, float], original: Mapping[str, float]) -> dict[str, float]:
    """Points that each adapter loses to the original (negative where it gains).

    Raises UsageError where the two do not hold the same adapters.
    """
    if scores.keys() != original.keys():
        odd = sorted(scores.keys() ^ original.keys())
        raise UsageError(
            f"scored in one arm only: {', '.join(odd)}", remedy="score every adapter in both arms"
        )
    return {adapter: original[adapter] - score for adapter, score in scores.items()}


def worst_regression(scores: Mapping[str, float], original: Mapping[str, float]) -> float:
    """Largest loss of any adapter, in points; 0 where none loses."""
    return max(0.0, *losses(scores, original).values())


def count_over(
    scores: Mapping[str, float], original: Mapping[str, float], points: float = NOTABLE_LOSS
) -> int:
    """Number of adapters that lose more than ``points``."""
    return sum(loss > points for loss in losses(scores, original).values())
