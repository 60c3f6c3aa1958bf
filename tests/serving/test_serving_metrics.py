"""Metrics equal numbers worked out by hand, and keep their laws on any records."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraforge.errors import InputError
from loraforge.serving.metrics import (
    failures,
    over_seeds,
    quantile,
    spread,
    summarise,
    tpot_s,
    ttft_s,
    ttft_text_s,
    wall_s,
)
from loraforge.serving.records import RequestRecord, Run, RunRecord


def request(number: int = 0, **changed: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "id": number,
        "fleet": "f",
        "adapter": "a",
        "model": "a",
        "asked_tokens": 5,
        "scheduled_s": 1.0,
        "sent_s": 1.0,
        "first_s": 1.5,
        "text_s": 1.75,
        "end_s": 2.5,
        "prompt_tokens": 7,
        "output_tokens": 5,
        "counted": "usage",
    }
    return RequestRecord(**(values | changed))


def run(*requests: RequestRecord, **changed: Any) -> Run:
    values: dict[str, Any] = {
        "workload": "0" * 64,
        "requests_sha256": "1" * 64,
        "arrivals_sha256": "2" * 64,
        "outputs_sha256": "3" * 64,
        "engine": "vllm",
        "seed": 101,
        "rate": 4.0,
        "stop": "exact",
        "base_only": False,
        "timeout_s": 60.0,
        "urls": {"f": "http://127.0.0.1:1"},
        "started": "2026-01-01T00:00:00.000+00:00",
    }
    return Run(run=RunRecord(**(values | changed)), requests=requests)


def test_latencies_by_hand() -> None:
    assert ttft_s(request()) == 0.5
    assert tpot_s(request()) == 0.25  # one second over four tokens after the first
    assert tpot_s(request(output_tokens=1)) is None
    assert ttft_text_s(request()) == 0.75
    assert ttft_text_s(request(text_s=None)) is ttft_text_s(request(failure="reset")) is None
    assert ttft_s(request(first_s=None)) is None
    assert ttft_s(request(failure="reset")) is None
    assert tpot_s(request(failure="reset")) is None


def test_a_replay_by_hand() -> None:
    summary = summarise(
        run(
            request(0),
            request(
                1,
                scheduled_s=2.0,
                sent_s=2.002,
                first_s=3.002,
                text_s=None,
                end_s=3.402,
                output_tokens=3,
                prompt_tokens=1,
            ),
            request(2, sent_s=2.0, first_s=None, end_s=6.0, output_tokens=None, failure="timeout"),
            request(
                3, sent_s=None, first_s=None, end_s=None, output_tokens=None, failure="not sent: interrupted"
            ),
        )
    )
    assert summary["requests"] == 4
    assert summary["completed"] == 2
    assert summary["failed"] == 2
    assert summary["wall_s"] == 5.0  # from the first sent, at 1, to the failure at 6: the drain counts
    assert summary["output_tokens"] == 8
    assert summary["prompt_tokens"] == 8
    assert summary["tok_s"] == pytest.approx(1.6)
    assert summary["requests_s"] == pytest.approx(0.4)
    assert summary["ttft_p50_s"] == pytest.approx(0.75)  # of 0.5 and 1.0
    assert summary["ttft_p99_s"] == pytest.approx(0.995)
    assert summary["ttft_text_p50_s"] == pytest.approx(0.75)  # of the first alone
    assert summary["without_text"] == 1
    assert summary["tpot_p50_ms"] == pytest.approx(225)  # of 250 and 200
    assert summary["tpot_p99_ms"] == pytest.approx(249.5)
    assert summary["lag_p99_ms"] == pytest.approx(980.04)  # of 0, 2 and 1000: 2 + 0.98 x 998


def test_nothing_was_sent() -> None:
    nothing = request(sent_s=None, first_s=None, end_s=None, output_tokens=None, failure="not sent: x")
    summary = summarise(run(nothing))
    assert summary["wall_s"] == 0
    assert summary["tok_s"] is summary["ttft_p50_s"] is summary["tpot_p99_ms"] is None
    assert failures([nothing, nothing]) == {"not sent: x": 2}
    assert wall_s([]) == 0


def test_over_seeds_by_hand() -> None:
    runs = [run(request(end_s=1.5 + s), seed=seed) for seed, s in ((1, 0.4), (2, 0.8), (3, 1.2))]
    found = over_seeds(runs)
    assert found["tpot_p50_ms"].mean == pytest.approx(200)
    assert found["tpot_p50_ms"].std == pytest.approx(100)  # of 100, 200, 300 with n - 1
    assert over_seeds(runs[:1])["tpot_p50_ms"].std is None
    assert "tpot_p50_ms" not in over_seeds([runs[0], run(request(output_tokens=1), seed=2)])


def test_what_is_not_averaged() -> None:
    with pytest.raises(InputError, match=r"the run of seed 2 ended early \(nobody listens"):
        over_seeds([run(request()), run(request(), seed=2, ended="nobody listens at x")])
    with pytest.raises(InputError, match="the same seed"):
        over_seeds([run(request()), run(request())])
    with pytest.raises(InputError, match="rate: differs"):
        over_seeds([run(request()), run(request(), seed=2, rate=8.0)])
    with pytest.raises(InputError, match="no runs"):
        over_seeds([])


MILLISECONDS = st.integers(0, 100_000).map(lambda ms: ms / 1000)
FINITE = st.floats(-1e6, 1e6)


@given(st.lists(FINITE, min_size=1), st.floats(0, 1), st.floats(0, 1))
def test_quantiles_lie_in_the_range_and_rise(values: list[float], p: float, q: float) -> None:
    low, high = (quantile(values, level) for level in sorted((p, q)))
    assert low is not None
    assert high is not None
    slack = 1e-9 * max(map(abs, values))
    assert min(values) - slack <= low <= high + slack
    assert high <= max(values) + slack
    assert quantile(values, 0) == min(values)
    assert quantile(values, 1) == max(values)


@given(
    st.lists(
        st.tuples(MILLISECONDS, MILLISECONDS, MILLISECONDS, st.integers(1, 500), st.booleans()),
        min_size=1,
        max_size=30,
    )
)
def test_laws_of_a_summary(rows: list[tuple[float, float, float, int, bool]]) -> None:
    requests = [
        request(
            number,
            scheduled_s=sent,
            sent_s=sent,
            first_s=sent + first,
            end_s=sent + first + rest,
            output_tokens=tokens,
            failure="reset" if failed else None,
        )
        for number, (sent, first, rest, tokens, failed) in enumerate(rows)
    ]
    summary = summarise(run(*requests))
    assert summary["completed"] + summary["failed"] == len(rows)  # type: ignore[operator]
    assert summary == summarise(run(*reversed(requests)))
    if summary["wall_s"]:
        assert summary["tok_s"] * summary["wall_s"] == pytest.approx(summary["output_tokens"])  # type: ignore[operator]
    if summary["completed"]:
        assert 0 <= summary["ttft_p50_s"] <= summary["ttft_p99_s"] <= summary["wall_s"] + 1e-9  # type: ignore[operator]


@given(st.lists(FINITE, min_size=2, max_size=8), FINITE)
def test_a_shift_moves_the_mean_and_keeps_the_deviation(values: list[float], shift: float) -> None:
    here, there = (spread([{"x": value + by} for value in values])["x"] for by in (0.0, shift))
    assert there.mean == pytest.approx(here.mean + shift, abs=1e-6)
    assert here.std is not None
    assert there.std is not None
    assert math.isclose(here.std, there.std, abs_tol=1e-6)
