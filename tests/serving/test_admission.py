"""Traces of schedulers: what is written step by step, and what is told of the first part of a window."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loraforge.errors import InputError, OutputError
from loraforge.runtime.trace import AdmissionTrace, Step
from loraforge.serving.admission import admission, read_trace

START = 1_764_500_000.0  # 2025-11-30T10:53:20Z
STARTED, ENDED = "2025-11-30T10:53:20.000+00:00", "2025-11-30T10:55:00.000+00:00"


def step(after_s: float, *, prefill: int = 0, decode: int = 0, held: bool = False, waiting: int = 0) -> Step:
    requests = int(prefill > 0)
    running = requests + decode
    return Step(1, START + after_s, held, prefill, decode, requests, decode, running, running + waiting)


def test_what_a_trace_holds_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = AdmissionTrace(path, "TRACE")
    trace.add(7, held=True, prefill=(30, 2), decode=(5, 5), running=7, unfinished=9)
    (found,) = read_trace(path)  # while it is still open
    assert (found.step, found.held, found.prefill_tokens, found.decode_requests) == (7, True, 30, 5)
    assert (found.running, found.unfinished) == (7, 9)
    trace.add(8, held=False, prefill=(0, 0), decode=(7, 7), running=7, unfinished=7)
    trace.close()
    assert [its.step for its in read_trace(path)] == [7, 8]
    with path.open("a") as stream:
        stream.write('{"step": 9, "ti')  # being written
    assert len(read_trace(path)) == 2
    AdmissionTrace(path, "TRACE").close()
    assert read_trace(path) == []


def test_the_first_minute_of_a_window_by_hand() -> None:
    steps = [
        step(-1, prefill=1000, decode=99),  # of the pass before
        step(0.5, prefill=100, waiting=4),
        step(1.0, decode=10, held=True, waiting=9),
        step(2.0, decode=30, held=True),
        step(59.0, prefill=300, decode=5),
        step(61.0, prefill=5000, decode=80),  # after the first minute
    ]
    found = admission(steps, STARTED, ENDED)
    assert (found.window_s, found.steps, found.held) == (60.0, 4, 2)
    assert (found.prefill_steps, found.prefill_tokens_mean, found.prefill_requests_mean) == (2, 200.0, 1.0)
    assert (found.decode_requests_mean, found.decode_requests_peak) == (15.0, 30)
    assert (found.running_peak, found.waiting_peak) == (30, 9)
    whole = admission(steps, STARTED, ENDED, window_s=3600)
    assert (whole.window_s, whole.decode_requests_peak) == (100.0, 80)
    nothing = admission([], STARTED, ENDED)
    assert (nothing.steps, nothing.prefill_tokens_mean, nothing.decode_requests_peak) == (0, None, 0)


@pytest.mark.parametrize("line", ["{}", "[]", '{"step": "one"}', "\xff"])
def test_what_is_no_trace_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(vars(step(0))) + f"\n{line}\n")
    with pytest.raises(InputError, match="line 2 is no step of a trace"):
        read_trace(path)


def test_a_trace_that_is_not_there_or_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="the engine records no admissions; install loraforge beside the engine"
    ):
        read_trace(tmp_path / "none")
    with pytest.raises(OutputError, match="TRACE: No such file"):
        AdmissionTrace(tmp_path / "no" / "trace", "TRACE")
