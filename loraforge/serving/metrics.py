"""Metrics of a replay, as pure functions of its records: throughput, latency quantiles, counts (paper B.1, B.4)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from loraforge.errors import InputError
from loraforge.serving.records import RequestRecord, Run


def ttft_s(request: RequestRecord) -> float | None:
    """Seconds from sending to the first token's chunk, connection included; None where the request failed."""
    return _after_sending(request, request.first_s)


def ttft_text_s(request: RequestRecord) -> float | None:
    """Seconds from sending to the first text, connection included; None where it failed or had no text."""
    return _after_sending(request, request.text_s)


def _after_sending(request: RequestRecord, when_s: float | None) -> float | None:
    if request.failure is not None or request.sent_s is None or when_s is None:
        return None
    return when_s - request.sent_s


def tpot_s(request: RequestRecord) -> float | None:
    """Seconds an output token after the first, (T_end - T_first) / (n_out - 1); None below two tokens."""
    if request.failure is not None or request.first_s is None or request.end_s is None:
        return None
    if request.output_tokens is None or request.output_tokens < 2:
        return None
    return (request.end_s - request.first_s) / (request.output_tokens - 1)


def quantile(values: Sequence[float], q: float) -> float | None:
    """Quantile ``q`` in [0, 1] with linear interpolation between order statistics; None of no values."""
    return float(np.quantile(np.asarray(values, dtype=np.float64), q)) if values else None


def wall_s(requests: Sequence[RequestRecord]) -> float:
    """Seconds from the first request sent to the last answer's end, so with the drain; 0 where nothing was sent."""
    sent = [request.sent_s for request in requests if request.sent_s is not None]
    ends = [request.end_s for request in requests if request.end_s is not None]
    return max(ends) - min(sent) if sent and ends else 0.0


def failures(requests: Sequence[RequestRecord]) -> dict[str, int]:
    """How many requests failed, by reason."""
    return dict(Counter(request.failure for request in requests if request.failure is not None))


def summarise(run: Run) -> dict[str, float | None]:
    """Flat figures of one replay; keys end in their unit.

    ``tok_s`` and ``requests_s`` count what was answered as asked, over :func:`wall_s`. ``lag_p99_ms`` is how late the
    client itself sent. None where no request gives a value.
    """
    requests = run.requests
    good = [request for request in requests if request.failure is None]
    wall = wall_s(requests)
    tokens = sum(request.output_tokens or 0 for request in good)
    ttft = [value for request in good if (value := ttft_s(request)) is not None]
    text = [value for request in good if (value := ttft_text_s(request)) is not None]
    tpot_ms = [value * 1e3 for request in good if (value := tpot_s(request)) is not None]
    lag_ms = [
        (request.sent_s - request.scheduled_s) * 1e3 for request in requests if request.sent_s is not None
    ]
    return {
        "requests": len(requests),
        "completed": len(good),
        "failed": len(requests) - len(good),
        "without_text": len(good) - len(text),
        "prompt_tokens": sum(request.prompt_tokens or 0 for request in good),
        "output_tokens": tokens,
        "wall_s": wall,
        "requests_s": len(good) / wall if wall else None,
        "tok_s": tokens / wall if wall else None,
        "ttft_p50_s": quantile(ttft, 0.50),
        "ttft_p99_s": quantile(ttft, 0.99),
        "ttft_text_p50_s": quantile(text, 0.50),
        "ttft_text_p99_s": quantile(text, 0.99),
        "tpot_p50_ms": quantile(tpot_ms, 0.50),
        "tpot_p99_ms": quantile(tpot_ms, 0.99),
        "lag_p99_ms": quantile(lag_ms, 0.99),
    }


@dataclass(frozen=True)
class Spread:
    """A figure over seeds: arithmetic mean, and sample standard deviation (no interval), None of one seed."""

    mean: float
    std: float | None


def over_seeds(runs: Sequence[Run]) -> dict[str, Spread]:
    """Mean and standard deviation of each figure of :func:`summarise` over runs that differ by seed alone.

    A figure that any run lacks is left out. Raises InputError where a run ended early (nothing is averaged over that),
    where seeds repeat, or where rate, stop or base_only differ.
    """
    if not runs:
        raise InputError("no runs to average")
    for run in runs:
        if run.run.ended is not None:
            raise InputError(
                f"the run of seed {run.run.seed} ended early ({run.run.ended})", remedy="run that seed again"
            )
    if len({run.run.seed for run in runs}) != len(runs):
        raise InputError("two runs have the same seed", key="seed")
    for key in ("rate", "stop", "base_only"):
        if len({getattr(run.run, key) for run in runs}) > 1:
            raise InputError("differs between the runs to average", key=key)
    return spread([summarise(run) for run in runs])


def spread(summaries: Sequence[Mapping[str, float | None]]) -> dict[str, Spread]:
    """Mean and sample standard deviation by key, of keys that every summary has a value for."""
    found: dict[str, Spread] = {}
    for key in summaries[0]:
        values = [value for summary in summaries if (value := summary[key]) is not None]
        if len(values) < len(summaries):
            continue
        mean = math.fsum(values) / len(values)
        deviations = math.fsum((value - mean) ** 2 for value in values)
        found[key] = Spread(mean, math.sqrt(deviations / (len(values) - 1)) if len(values) > 1 else None)
    return found
