"""Paired comparison of two arms over one fleet: differences with seeded bootstrap intervals. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loraforge.errors import UsageError
from loraforge.quality.scores import Sample, count_over, macro, worst

SEED = 20261130
DRAWS = 2000
LEVEL = 0.95

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Comparison:
    """An arm against another, in points of the adapter-macro mean.

    ``delta`` is arm minus other; ``ci_low`` and ``ci_high`` bound it at ``LEVEL``. ``worst_regression`` is the
    largest loss of one adapter (0 where none loses), ``over5`` the number that lose more than five points.
    """

    delta: float
    ci_low: float
    ci_high: float
    worst_regression: float
    worst_adapter: str
    over5: int


def compare(
    arm: Mapping[str, Sample],
    other: Mapping[str, Sample],
    *,
    seed: int = SEED,
    draws: int = DRAWS,
    level: float = LEVEL,
) -> Comparison:
    """Compare two arms that scored the same adapters on the same examples.

    Raises UsageError where adapters, metrics or numbers of examples differ.
    """
    scores = {name: item.score for name, item in arm.items()}
    others = {name: item.score for name, item in other.items()}
    worst_adapter, loss = worst(scores, others)  # also refuses unequal adapters
    low, high = bootstrap(arm, other, seed=seed, draws=draws, level=level)
    return Comparison(
        delta=macro(scores) - macro(others),
        ci_low=low,
        ci_high=high,
        worst_regression=loss,
        worst_adapter=worst_adapter,
        over5=count_over(scores, others),
    )


@dataclass(frozen=True)
class Intervals:
    """Intervals of one macro difference, (low, high) in points, by what is drawn anew.

    ``examples``: these adapters, other examples of their tasks. ``adapters``: these examples, other adapters. ``both``.
    """

    examples: tuple[float, float]
    adapters: tuple[float, float]
    both: tuple[float, float]


class Resampling:
    """Draws that all arms of a fleet share, so that intervals of two arms differ by their scores alone.

    sizes: number of examples by adapter. Draws depend on it and the seed, not on any order.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        *,
        seed: int = SEED,
        draws: int = DRAWS,
        level: float = LEVEL,
    ) -> None:
        if not sizes:
            raise UsageError("no adapters to draw from")
        chance = np.random.default_rng(seed)
        self._names = sorted(sizes)
        self._counts = {
            name: chance.multinomial(sizes[name], np.full(sizes[name], 1 / sizes[name]), size=draws).astype(
                np.float64
            )
            for name in self._names
        }
        self._picked = chance.integers(len(self._names), size=(draws, len(self._names)))
        self._rounds = chance.integers(draws, size=self._picked.shape)
        self._level = level

    def intervals(self, arm: Mapping[str, Sample], other: Mapping[str, Sample]) -> Intervals:
        """Intervals of ``arm`` minus ``other``, paired by adapter and example.

        Raises UsageError where the two were not scored on the examples that are drawn.
        """
        if not arm.keys() == other.keys() == self._counts.keys():
            raise UsageError("the arms were not scored on the same adapters", remedy="score both again")
        drawn = np.stack([self._differences(name, arm[name], other[name]) for name in self._names])
        points = np.array([arm[name].score - other[name].score for name in self._names])
        return Intervals(
            examples=self._ends(drawn.mean(axis=0)),
            adapters=self._ends(points[self._picked].mean(axis=1)),
            both=self._ends(drawn[self._picked, self._rounds].mean(axis=1)),
        )

    def _differences(self, name: str, arm: Sample, other: Sample) -> Floats:
        counts = self._counts[name]
        if arm.metric != other.metric or not len(arm.stats) == len(other.stats) == counts.shape[1]:
            raise UsageError(
                "the arms were not scored on the same examples", key=name, remedy="score both arms again"
            )
        return _scores(arm.metric, counts, arm.stats) - _scores(other.metric, counts, other.stats)

    def _ends(self, means: Floats) -> tuple[float, float]:
        tail = (1 - self._level) / 2
        low, high = np.quantile(means, [tail, 1 - tail])
        return float(low), float(high)


def bootstrap(
    arm: Mapping[str, Sample],
    other: Mapping[str, Sample],
    *,
    seed: int = SEED,
    draws: int = DRAWS,
    level: float = LEVEL,
) -> tuple[float, float]:
    """Percentile interval of the macro difference, resampled in two stages and paired throughout.

    Adapters are drawn with replacement; for each drawn adapter its examples are, anew, the same for both arms.
    Adapters are visited in sorted order, so that the interval depends on the data and the seed alone.
    """
    chance = np.random.default_rng(seed)
    names = sorted(arm)
    deltas = np.stack([_example_draws(name, arm[name], other[name], chance, draws) for name in names])
    picked = chance.integers(len(names), size=(draws, len(names)))
    # an adapter drawn twice in one round gets two independent draws of its examples
    rounds = chance.integers(draws, size=picked.shape)
    means = deltas[picked, rounds].mean(axis=1)
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def _example_draws(name: str, arm: Sample, other: Sample, chance: np.random.Generator, draws: int) -> Floats:
    """Differences in points of one adapter over ``draws`` resamples of its examples: [draws]."""
    if arm.metric != other.metric or len(arm.stats) != len(other.stats):
        raise UsageError(
            "the arms were not scored on the same examples", key=name, remedy="score both arms again"
        )
    n = len(arm.stats)
    counts = chance.multinomial(n, np.full(n, 1 / n), size=draws).astype(np.float64)
    return _scores(arm.metric, counts, arm.stats) - _scores(other.metric, counts, other.stats)


def _scores(metric: str, counts: Floats, stats: Sequence[Sequence[float]]) -> Floats:
    """``metrics.aggregate`` of many resamples at once; ``counts`` [draws, n] says how often each example came."""
    sums: Floats = counts @ np.asarray(stats, dtype=np.float64)
    if metric != "field_f1":
        means: Floats = sums[:, 0] / len(stats)
        return means
    total = 2 * sums[:, 0] + sums[:, 1] + sums[:, 2]
    f1: Floats = np.divide(200 * sums[:, 0], total, out=np.zeros_like(total), where=total > 0)
    return f1
