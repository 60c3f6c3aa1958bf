"""Scores of a fleet: one number an adapter from per-example statistics, and what a policy loses by it. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loraforge.errors import UsageError
from loraforge.quality.metrics import aggregate

LARGE_LOSS = 5.0  # points; the paper counts adapters that lose more than this
_ROUNDING = 1e-9  # a loss of exactly five points can be 5 + 1e-14 as a difference of two means


@dataclass(frozen=True)
class Sample:
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
    # rounded once: a plain sum depends on the version of Python, and selections state hashes of what it gives
    return math.fsum(scores.values()) / len(scores)


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


def worst(scores: Mapping[str, float], original: Mapping[str, float]) -> tuple[str, float]:
    """The adapter that loses most, and how many points (0 where none loses)."""
    found = losses(scores, original)
    name = max(sorted(found), key=lambda adapter: found[adapter])
    return name, max(0.0, found[name])


def count_over(scores: Mapping[str, float], original: Mapping[str, float], points: float = LARGE_LOSS) -> int:
    """Number of adapters that lose more than ``points``."""
    return sum(loss > points + _ROUNDING for loss in losses(scores, original).values())
