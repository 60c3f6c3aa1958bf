"""Serving targets: numbers worked out by hand, and records that are no evidence."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from synthetic_serving import ARMS, point, serving, workload

from loraforge.errors import InputError
from loraforge.evidence.targets import TARGETS

Records = list[dict[str, Any]]


def read(target: str, records: Records) -> list[Any]:
    kind = TARGETS[target]
    found = kind.parse([json.dumps(record) for record in records], "records.jsonl")
    kind.check(found, "records.jsonl")
    return found


def summary(target: str, records: Records) -> dict[str, Any]:
    return TARGETS[target].summarise(read(target, records), "smol")


def only(records: Records, **wanted: Any) -> dict[str, Any]:
    """The one point with these values."""
    (found,) = (
        record
        for record in records
        if record["record"] == "point" and all(record[key] == value for key, value in wanted.items())
    )
    return found


def with_figures(records: Records, arm: str, **figures: tuple[float, float]) -> None:
    """Set figures of an arm's two seeds at the lower rate of ``mixed_serving_vllm``."""
    for place, seed in enumerate((101, 102)):
        chosen = only(records, arm=arm, rate=16.0, seed=seed)
        chosen["figures"] |= {name: values[place] for name, values in figures.items()}


def test_means_deviations_and_quotients_by_hand() -> None:
    records = serving("mixed_serving_vllm")
    with_figures(records, "original_native", tok_s=(100.0, 200.0), tpot_p99_ms=(80.0, 80.0))
    with_figures(records, "original_loraforge", tok_s=(110.0, 220.0))
    with_figures(records, "spectral_loraforge", tok_s=(400.0, 200.0), tpot_p99_ms=(20.0, 20.0))
    with_figures(records, "base_only", tok_s=(500.0, 250.0), ttft_p50_s=(0.2, 0.4))
    found = summary("mixed_serving_vllm", records)
    assert found["tok_s.original_native.16"] == pytest.approx(150.0)
    assert found["tok_s.original_native.16.std"] == pytest.approx(math.sqrt(5000.0))
    assert found["ttft_p50_s.base_only.16"] == pytest.approx(0.3)
    assert found["tpot_p99_ms.spectral_loraforge.16"] == pytest.approx(20.0)
    assert found["ratio.s12_over_original.16"] == pytest.approx(2.0)  # of pairs, 4 and 1: not 300 over 150
    assert found["ratio.s12_over_base.16"] == pytest.approx(0.8)
    assert found["ratio.execution_original.16"] == pytest.approx(1.1)
    assert found["tpot_ratio.s12_over_original.16"] == pytest.approx(0.25)
    assert "ratio.execution_uniform.16" not in found  # no arm serves uniform weights
    assert found["engine"] == "vllm 0.26.0"
    assert (found["seeds"], found["points"], found["points_declared"], found["failed"]) == (2, 20, 20, 0)


def test_execution_alone_is_over_native_execution_of_the_same_weights() -> None:
    found = summary("six_cell", serving("six_cell", grid=True))
    for name, weights in (
        ("execution_only", "spectral"),
        ("execution_uniform", "uniform"),
        ("execution_original", "original"),
    ):
        over = found[f"tok_s.{weights}_loraforge.32"] / found[f"tok_s.{weights}_native.32"]
        assert found[f"ratio.{name}.32"] == pytest.approx(over, rel=0.01)
    assert found["ratio.execution_only.32"] > 1.05


def test_room_for_all_is_held_against_room_for_some() -> None:
    found = summary("residency", serving("residency"))
    assert found["ratio.full_over_limited.original_native.128"] == pytest.approx(1.4, rel=0.05)
    assert found["ratio.full_over_limited.spectral_loraforge.128"] == pytest.approx(1.0, rel=0.05)
    assert found["ratio.s12_over_original.full.128"] < found["ratio.s12_over_original.128"]


def test_loads_and_memory() -> None:
    records = serving("fixed_work")
    for record in records:
        if record["record"] == "point" and record["arm"] == "original_native":
            record["loads"] = 100 if record["rate"] == 64.0 else 300
            record["source_bytes"] = record["loads"] * 2**30
            record["pool_bytes"] = record["seed"] * 10
            record["peak_allocated_bytes"] = 50 + record["seed"]
    found = summary("fixed_work", records)
    assert found["loads.original_native"] == pytest.approx(200.0)
    assert found["loads.original_native.64"] == pytest.approx(100.0)
    assert found["source_gib.original_native.128"] == pytest.approx(300.0)
    assert found["pool_bytes.original_native"] == 1020  # the most, after any point
    assert found["peak_gib.original_native"] * 2**30 == 152  # one start: its last high-water mark
    assert found["pool_bytes.spectral_loraforge.qwen50"] == int(0.9 * 2**30)
    assert found["loads.spectral_loraforge"] == 0
    assert "loads.base_only" not in found
    assert "pool_bytes.base_only" not in found


@pytest.mark.parametrize("mixed", ["mixed_serving_vllm", "mixed_serving_sglang"])
def test_a_mixed_experiment_of_declared_lengths_is_fixed_work_too(mixed: str) -> None:
    records = serving(mixed)
    assert summary("fixed_work", records) == summary(mixed, records)
    with pytest.raises(InputError, match="end by themselves, which are no fixed work"):
        read("fixed_work", serving(mixed, stop="natural"))
    with pytest.raises(InputError, match="is an experiment 'six_cell', no fixed_work"):
        read("fixed_work", serving("six_cell"))


def test_peaks_are_means_over_starts() -> None:
    records = serving("six_cell")
    (setting, first), later = records[:2], dict(records[1])
    later["number"] = 99
    for record in records:
        if record["record"] == "point" and record["arm"] == first["arm"]:
            record["start"] = first["number"] if record["seed"] == 101 else 99
            record["peak_allocated_bytes"] = int(record["rate"] * (1 if record["seed"] == 101 else 3))
    found = summary("six_cell", [setting, first, later, *records[2:]])
    assert found[f"peak_gib.{first['arm']}"] * 2**30 == pytest.approx((32 + 96) / 2)


def test_what_ended_early_or_lacks_a_seed_is_not_averaged() -> None:
    records = serving("mixed_serving_vllm")
    whole = summary("mixed_serving_vllm", records)
    ended = only(records, arm="base_only", rate=32.0, seed=102)
    ended["stopped"] = "nobody listens at ..."
    found = summary("mixed_serving_vllm", records)
    assert "tok_s.base_only.32" not in found
    assert "ratio.s12_over_base.32" not in found
    assert found["tok_s.base_only.16"] == whole["tok_s.base_only.16"]
    assert (found["points"], found["points_declared"], found["points_stopped"]) == (18, 20, 1)
    again = point("mixed_serving_vllm", "base_only", 3, workload(32.0, 102), ["qwen50"], 3000.0, 1.0, "exact")
    found = summary("mixed_serving_vllm", [*records, again])
    assert found["points"] == 20
    assert "tok_s.base_only.32" in found


def test_failed_requests_are_counted_and_too_many_are_no_evidence() -> None:
    records = serving("cpu_serving")
    chosen = only(records, arm="original_native", rate=0.5, seed=101)
    target = TARGETS["cpu_serving"]
    for failed, holds in ((17, True), (18, False)):
        chosen["figures"]["failed"] = failed
        parsed = read("cpu_serving", records)
        assert target.summarise(parsed, "smol")["failed"] == failed
        assert [claim.passed for claim in target.claims(parsed)] == [holds]


def other_requests(records: Records) -> None:
    chosen = only(records, arm="original_loraforge", rate=16.0, seed=102)
    chosen["workload"] = {**chosen["workload"], "requests_sha256": "0" * 64}


def other_lengths(records: Records) -> None:
    chosen = only(records, arm="original_loraforge", rate=16.0, seed=102)
    chosen["workload"] = workload(16.0, 102, "other")


def undeclared_seed(records: Records) -> None:
    only(records, arm="original_loraforge", rate=16.0, seed=102)["seed"] = 103


def silently_native(records: Records) -> None:
    for record in records:
        if record["record"] == "start" and record["arm"] == "spectral_loraforge":
            record["engines"] = json.loads(json.dumps(record["engines"]))
            record["engines"]["llama35"]["counters"]["execution"] = "native"


def unsaid(records: Records) -> None:
    for record in records:
        if record["record"] == "start" and record["arm"] == "spectral_loraforge":
            record["engines"] = {"qwen50": record["engines"]["qwen50"] | {"counters": None}}


def another_experiment(records: Records) -> None:
    for record in records:
        record["experiment"] = "six_cell"


def mixed_in(records: Records) -> None:
    records[-1]["experiment"] = "six_cell"


def of_a_failed_start(records: Records) -> None:
    next(record for record in records if record["record"] == "start")["failure"] = "ended with SIGKILL"


def fewer_requests(records: Records) -> None:
    only(records, arm="original_loraforge", rate=16.0, seed=102)["figures"]["requests"] = 0


def no_lengths(records: Records) -> None:
    del records[0]["config"]["fleets"]["qwen50"]["output_tokens"]


def nothing_whole(records: Records) -> None:
    for record in records:
        if record["record"] == "point" and record["seed"] == 101:
            record["stopped"] = "interrupted by SIGTERM"


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (
            other_requests,
            "original_loraforge at rate 16, seed 102 replayed another workload .*requests_sha256",
        ),
        (other_lengths, "seed 102 replayed another workload .*outputs_sha256"),
        (undeclared_seed, "seed 103 is not of the declared workloads"),
        (silently_native, "the engine of llama35 says it serves by native kernels"),
        (unsaid, "the engine of qwen50 says it serves by no kernels"),
        (another_experiment, "is an experiment 'six_cell', no mixed_serving_vllm"),
        (mixed_in, "has a point of six_cell in mixed_serving_vllm"),
        (of_a_failed_start, "has a point of start 0, which failed"),
        (fewer_requests, "says 0.* of 1700 requests of original_loraforge at rate 16, seed 102"),
        (no_lengths, "config.fleets.qwen50.output_tokens: Field required"),
        (nothing_whole, "no arm with every declared seed of a rate"),
    ],
)
def test_records_that_are_no_evidence_are_refused(spoil: Callable[[Records], None], what: str) -> None:
    records = serving("mixed_serving_vllm")
    spoil(records)
    with pytest.raises(InputError, match=what):
        read("mixed_serving_vllm", records)


def test_the_base_model_alone_may_repeat_lengths_of_its_own() -> None:
    records = serving("cpu_serving")
    base = only(records, arm="base_only", rate=0.5, seed=101)
    assert base["workload"]["outputs_sha256"] != records[0]["workloads"][0]["outputs_sha256"]
    read("cpu_serving", records)
    base["workload"] = {**base["workload"], "arrivals_sha256": "0" * 64}
    with pytest.raises(InputError, match=r"base_only at rate 0\.5, seed 101 replayed another workload"):
        read("cpu_serving", records)


@pytest.mark.parametrize("target", list(ARMS))
def test_inputs_are_the_workloads_and_originals_are_held_against_the_lock(target: str) -> None:
    parsed = read(target, serving(target))
    inputs = TARGETS[target].inputs(parsed)
    rates = 1 if target in ("residency", "stopping_contract", "adapters_500") else 2
    assert len(inputs) == 2 * rates * (2 if target == "single_fleet" else 1)
    assert all("workloads/" in name for name in inputs)
    assert TARGETS[target].original_hashes(parsed).keys() == {"a", "b"}


def test_another_engine_is_in_the_records_alone() -> None:
    records = serving("six_cell")
    records[0]["engine"] = "sglang 0.5.22"
    assert summary("six_cell", records)["engine"] == "sglang 0.5.22"


def test_ways_to_end_answers_are_told_apart_and_held_against_the_first() -> None:
    records = serving("stopping_contract")
    for record in records:
        if record["record"] == "point":
            longer = {"early": 1.0, "exact": 3.0, "exact-eos": 2.0}[record["stop"]]
            record["figures"] = record["figures"] | {"tpot_p99_ms": 100.0 * longer, "tok_s": 300.0 * longer}
    found = summary("stopping_contract", records)
    assert (found["points"], found["points_declared"]) == (12, 12)
    assert found["tpot_p99_ms.spectral_loraforge.exact.64"] == pytest.approx(300.0)
    assert found["tpot_ratio.exact_over_early.spectral_loraforge.64"] == pytest.approx(3.0)
    assert found["ratio.exact-eos_over_early.base_only.64"] == pytest.approx(2.0)
    assert found["ratio.s12_over_base.exact.64"] == pytest.approx(1.0)
    assert "ratio.s12_over_base.64" not in found
    assert found["decode_requests_peak.spectral_loraforge.exact.64.llama35"] == pytest.approx(80.0)
    assert found["prefill_tokens_mean.base_only.early.64.qwen50"] == pytest.approx(800.0)
    assert found["peak_gib.spectral_loraforge"] > 0  # of the one start that serves all ways


def test_a_stopping_contract_without_a_trace_is_no_evidence() -> None:
    records = serving("stopping_contract")
    del records[-1]["admission"]["llama35"]
    with pytest.raises(
        InputError, match=r"base_only\.exact-eos at rate 64, seed 102 has no admissions of llama35"
    ):
        read("stopping_contract", records)
    records = serving("stopping_contract")
    records[0]["config"]["stops"] = ["exact"]
    with pytest.raises(InputError, match=r"one way to end answers|no arm with every declared seed"):
        read("stopping_contract", records)


def test_lengths_of_natural_answers_are_repeated_by_exact_ones() -> None:
    records = serving("stopping_contract")
    records[0]["config"]["stops"] = ["natural", "exact", "exact-eos"]
    own = [
        record
        for record in records
        if not (record.get("arm") == "base_only" and record.get("stop") == "early")
    ]
    for record in own:
        if record["record"] == "point":
            if record["stop"] == "early":
                record["stop"] = "natural"
            else:
                record["workload"] = workload(64.0, record["seed"], "repeated")
    found = summary("stopping_contract", own)
    assert (found["points"], found["points_declared"]) == (10, 10)  # the base model has no natural answers
    only(own, arm="spectral_loraforge", stop="natural", seed=101)["workload"] = workload(
        64.0, 101, "repeated"
    )
    with pytest.raises(
        InputError, match=r"spectral_loraforge\.natural at rate 64, seed 101 replayed another workload"
    ):
        read("stopping_contract", own)


def test_each_fleet_alone_has_keys_of_its_own() -> None:
    records = serving("single_fleet")
    found = summary("single_fleet", records)
    assert found["engine"] == "sglang 0.5.22"
    assert found["points"] == found["qwen50.points"] + found["llama35.points"] == 32
    over = found["qwen50.tok_s.spectral_loraforge.8"] / found["qwen50.tok_s.base_only.8"]
    assert found["qwen50.ratio.s12_over_base.8"] == pytest.approx(over, rel=0.01)
    assert "llama35.tok_s.original_native.4" in found
    half = len(records) // 2
    assert summary("single_fleet", records[:half])["points"] == 16  # one fleet alone is evidence too
    with pytest.raises(InputError, match="states the setting of qwen50 twice"):
        read("single_fleet", records[:half] * 2)
    both = serving("mixed_serving_sglang")
    for record in both:
        record["experiment"] = "single_fleet"
    with pytest.raises(InputError, match="serves several fleets at once"):
        read("single_fleet", both)
    records[half]["engine"] = "sglang 0.5.23"
    with pytest.raises(InputError, match="is of several engines"):
        read("single_fleet", records)


def test_two_experiments_in_one_bag_of_another_target_are_refused() -> None:
    with pytest.raises(InputError, match="states the setting twice"):
        read("six_cell", serving("six_cell") * 2)


def test_many_names_of_an_adapter_are_held_against_one() -> None:
    records = serving("adapters_500")
    for record in records:
        if record["record"] == "point":
            record["figures"] = record["figures"] | {"tok_s": 90.0 if "x10" in record["arm"] else 100.0}
    found = summary("adapters_500", records)
    assert found["adapters_500.ratio"] == pytest.approx(0.9)
    assert found["ratio.copies.spectral_loraforge.128"] == pytest.approx(0.9)
    assert found["tok_s.spectral_loraforge_x10.128"] == pytest.approx(90.0)
