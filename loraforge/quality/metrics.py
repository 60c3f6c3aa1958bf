"""Scores of generated text: for lm-eval's task files, and for the audit, which has neither torch nor lm-eval.

Every metric is in percent, 0 to 100. A prediction counts up to its first newline, without surrounding blanks.
A prediction's statistics are ``[score]`` for ``exact_match`` and ``chrf`` and ``[true positives, false
positives, false negatives]`` for ``field_f1``; :func:`aggregate` makes one number of a list of them.

chrF is Popović (2015), character n-grams to order 6, beta 2, as sacrebleu computes it, averaged over sentences.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from loraforge.errors import MissingDependencyError, UsageError
from loraforge.files import canonical_json

METRICS = ("exact_match", "chrf", "field_f1")


def clean(prediction: str) -> str:
    """What of a generated text is scored: its first line that starts after leading blanks."""
    return prediction.strip().split("\n", 1)[0].strip()


def per_example(metric: str, prediction: str, target: str) -> list[float]:
    """Statistics of one prediction: ``[score]`` or ``[tp, fp, fn]``. Raises UsageError for an unknown metric."""
    predicted = clean(prediction)
    if metric == "exact_match":
        return [100.0 if predicted == target.strip() else 0.0]
    if metric == "chrf":
        return [float(_chrf().sentence_score(predicted, [target]).score)]
    if metric == "field_f1":
        return [float(count) for count in field_counts(predicted, target)]
    raise _unknown(metric)


def aggregate(metric: str, stats: Sequence[Sequence[float]]) -> float:
    """One score in percent of many predictions' statistics: their mean, or the micro-averaged F1 of fields.

    Raises UsageError for an unknown metric or no statistics.
    """
    if metric not in METRICS:
        raise _unknown(metric)
    if not stats:
        raise UsageError("no predictions to aggregate", key=metric)
    if metric != "field_f1":
        return math.fsum(stat[0] for stat in stats) / len(stats)  # rounded once, by any version of Python
    hits, spurious, missed = (sum(stat[i] for stat in stats) for i in range(3))
    total = 2 * hits + spurious + missed
    return 200.0 * hits / total if total else 0.0


def field_counts(prediction: str, target: str) -> tuple[int, int, int]:
    """True positives, false positives and false negatives of the fields of a prediction.

    The target's form decides how both are read: a JSON object (one field a key; a prediction that is no JSON
    object has no fields), ``Key: value | Key: value`` (a part without a key is a wrong field), or else tokens
    between blanks. Fields are counted as a multiset, in any order.
    """
    wanted, found = Counter(_fields(target, target)), Counter(_fields(prediction, target))
    hits = (wanted & found).total()
    return hits, found.total() - hits, wanted.total() - hits


def exact_match(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """lm-eval ``process_results``: ``{"exact_match": 0 or 100}``."""
    return {"exact_match": per_example("exact_match", results[0], doc["target"])[0]}


def chrf(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """lm-eval ``process_results``: ``{"chrf": 0..100}``."""
    return {"chrf": per_example("chrf", results[0], doc["target"])[0]}


def field_f1(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """lm-eval ``process_results``: ``{"field_f1": (tp, fp, fn)}``; :func:`aggregate_field_f1` makes it a score."""
    return {"field_f1": tuple(per_example("field_f1", results[0], doc["target"]))}


def aggregate_exact_match(items: Sequence[float]) -> float:
    """lm-eval ``aggregation`` of :func:`exact_match`."""
    return aggregate("exact_match", [[item] for item in items])


def aggregate_chrf(items: Sequence[float]) -> float:
    """lm-eval ``aggregation`` of :func:`chrf`."""
    return aggregate("chrf", [[item] for item in items])


def aggregate_field_f1(items: Sequence[Sequence[float]]) -> float:
    """lm-eval ``aggregation`` of :func:`field_f1`."""
    return aggregate("field_f1", items)


def _fields(text: str, target: str) -> list[tuple[str, str]]:
    if target.lstrip().startswith("{"):
        return _json_fields(text)
    parts = [part.strip() for part in text.split("|")]
    if ": " in target.split("|", 1)[0]:
        pairs = [part.partition(": ") for part in parts if part]
        return [(key.strip(), value.strip()) if colon else ("", key) for key, colon, value in pairs]
    return [("", token) for token in text.split()]


def _json_fields(text: str) -> list[tuple[str, str]]:
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return []
    if not isinstance(value, dict):
        return []
    try:
        return [(key, canonical_json(item)) for key, item in value.items()]
    except ValueError:  # NaN and infinities, which json reads though JSON has none
        return []


@cache
def _chrf() -> Any:
    try:
        from sacrebleu.metrics import CHRF
    except ImportError as error:
        raise MissingDependencyError(
            "chrF needs sacrebleu", remedy="pip install 'loraforge[quality]'"
        ) from error
    return CHRF()


def _unknown(metric: str) -> UsageError:
    return UsageError("no such metric", key=metric, remedy=f"choose from {', '.join(METRICS)}")
