"""How an arm compares with the original adapters: macro difference, its interval, and the worst losses.

The interval is a paired, stratified percentile bootstrap: each resample draws examples within every adapter's test
set, the same ones for both arms, and averages the adapters' differences. Adapters are fixed, not resampled: the
fleet is what it is, and its test examples are the sample.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loraforge.quality.metrics import aggregate

RESAMPLES = 2000
SEED = 20261130
LEVEL = 0.95
LARGE_LOSS = 5.0  # points; the paper counts adapters that lose more


@dataclass(frozen=True)
class Sample:
    """One adapter's per-example statistics of one metric, shape [examples, statistics]."""

    metric: str
    stats: Sequence[Sequence[float]]


@dataclass(frozen=True)
class Comparison:
    """An arm against original, in points; ``worst_regression`` is 0 where no adapter loses."""

    delta: float
    ci_low: float
    ci_high: float
    worst_regression: float
    worst_adapter: str
    over5: int


def compare(arm: Mapping[str, Sample], original: Mapping[str, Sample]) -> Comparison:
    """Compare two arms over the same adapters and examples.

    The resamples depend on the adapter's name alone, so that all arms of a study are compared on the same ones.
    """
    losses: dict[str, float] = {}
    resampled = np.zeros(RESAMPLES)
    for adapter in sorted(original):
        mine, theirs = arm[adapter], original[adapter]
        losses[adapter] = aggregate(theirs.metric, theirs.stats) - aggregate(mine.metric, mine.stats)
        picks = _picks(adapter, len(theirs.stats))
        resampled += (_scores(mine, picks) - _scores(theirs, picks)) / len(original)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    worst = max(losses, key=lambda name: losses[name])
    return Comparison(
        delta=-sum(losses.values()) / len(losses),
        ci_low=float(low),
        ci_high=float(high),
        worst_regression=max(0.0, losses[worst]),
        worst_adapter=worst,
        # A loss of exactly five points can be 5 + 1e-14 as a difference of two means.
        over5=sum(loss > LARGE_LOSS + 1e-9 for loss in losses.values()),
    )


def _picks(adapter: str, examples: int) -> NDArray[np.int64]:
    """Indices of resampled examples, [RESAMPLES, examples]."""
    draw = np.random.default_rng([SEED, zlib.crc32(adapter.encode())])
    return draw.integers(0, examples, size=(RESAMPLES, examples))


def _scores(sample: Sample, picks: NDArray[np.int64]) -> NDArray[np.float64]:
    """Score of every resample, [RESAMPLES], as :func:`loraforge.quality.metrics.aggregate` defines it."""
    stats = np.asarray(sample.stats, dtype=np.float64)
    sums = [np.asarray(column[picks].sum(axis=1), dtype=np.float64) for column in stats.T]
    if sample.metric != "field_f1":
        return sums[0] / len(stats)
    hits, spurious, missed = sums
    total = 2 * hits + spurious + missed
    share = np.zeros(RESAMPLES)
    np.divide(200 * hits, total, out=share, where=total > 0)
    return share
