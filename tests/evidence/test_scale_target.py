"""The target ``scale``: its summary by hand, and records that are no evidence."""

from __future__ import annotations

import json
from typing import Any

import pytest
import synthetic

from loraforge.errors import InputError
from loraforge.evidence.targets import TARGETS

TARGET = TARGETS["scale"]


def parsed(records: list[dict[str, Any]]) -> list[Any]:
    found = TARGET.parse([json.dumps(record) for record in records], "records.jsonl")
    TARGET.check(found, "records.jsonl")
    return found


def step(records: list[dict[str, Any]], adapters: int, name: str) -> dict[str, Any]:
    return next(item for item in records if item.get("adapters") == adapters and item["step"] == name)


def failed(records: list[dict[str, Any]]) -> list[str]:
    return [claim.claim for claim in TARGET.claims(parsed(records)) if not claim.passed]


def test_summary_by_hand() -> None:
    summary = TARGET.summarise(parsed(synthetic.scale()), "")
    assert summary["adapters_1000.factor_s"] == 250.0
    assert summary["adapters_1000.peak_gib"] == 0.5 + 100 / 1024
    assert (summary["add_one_s"], summary["remove_one_s"], summary["rebudget_s"]) == (2.5, 1.8, 1.5)
    assert (summary["adapters_10.add_one_s"], summary["adapters_100.rebudget_s"]) == (0.52, 0.15)
    assert [
        summary[f"adapters_1000.{name}_factorised"] for name in ("add_one", "remove_one", "rebudget")
    ] == [1, 0, 0]
    assert summary["adapters_1000.modules"] == 252_000
    assert summary["peak_mib_an_adapter"] == pytest.approx(0.1)
    assert failed(synthetic.scale()) == []


@pytest.mark.parametrize(
    ("name", "change", "claim"),
    [
        ("add", {"factorised": 2}, "difference of factorised and due adapters, add of 100"),
        ("remove", {"factorised": 1}, "difference of factorised and due adapters, remove of 100"),
        ("rebudget", {"factorised": 1}, "difference of factorised and due adapters, rebudget of 100"),
        ("factor", {"factorised": 99}, "difference of factorised and due adapters, factor of 100"),
        ("resume", {"factorised": 5}, "difference of factorised and due adapters, resume of 100"),
        ("allocate", {"spent": 60_001}, "parameters spent, allocate of 100"),
        ("factor", {"max_action_error": 1e-4}, "relative action error"),
        ("add", {"max_spectrum_error": 1e-3}, "relative spectrum error"),
    ],
)
def test_what_must_hold_is_claimed(name: str, change: dict[str, Any], claim: str) -> None:
    records = synthetic.scale()
    step(records, 100, name).update(change)
    assert failed(records) == [claim]


def test_memory_that_grows_with_factors_is_refused() -> None:
    records = synthetic.scale()
    step(records, 1000, "factor")["peak_gib"] = 8.0
    assert failed(records) == ["MiB that peak memory grows by an adapter"]


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("add", {"fleet": 100}, "add planned another fleet"),
        ("factor", {"ceiling": 5, "spent": 5}, "ceiling and spent are those of an allocation"),
        ("allocate", {"ceiling": None}, "ceiling and spent are those of an allocation"),
        ("add", {"lost": 2, "done_when_killed": 1}, "those of a run that resumes"),
        ("factor", {"peak_gib": 0.1}, "the peak is below the baseline"),
        ("factor", {"adapters": 1}, "greater than or equal to 2"),
    ],
)
def test_records_that_contradict_themselves_are_refused(
    name: str, change: dict[str, Any], problem: str
) -> None:
    records = synthetic.scale()
    step(records, 100, name).update(change)
    with pytest.raises(InputError, match=problem):
        parsed(records)


def test_every_step_is_stated_once() -> None:
    run, *steps = synthetic.scale()
    for records, problem in (
        ([run, *steps[:-1]], "1000 adapters: lacks the step remove"),
        ([run, *steps, steps[0]], "states a step twice"),
        ([run], "holds no step"),
        (steps, "does not hold its run"),
    ):
        with pytest.raises(InputError, match=problem):
            parsed(records)
