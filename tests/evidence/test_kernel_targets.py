"""Summaries of the kernel benchmark against numbers worked out by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from synthetic import KERNEL_SETTING as SETTING
from synthetic import cell

from loraforge.errors import InputError
from loraforge.evidence.targets import TARGETS


def summary(target: str, records: list[dict[str, Any]]) -> dict[str, Any]:
    kind = TARGETS[target]
    found = kind.parse([json.dumps(record) for record in [SETTING, *records]], "records.jsonl")
    kind.check(found, "records.jsonl")
    return kind.summarise(found, "none")


def test_geometric_means_are_over_the_best_native_of_each_case() -> None:
    found = summary(
        "shrink_ablation",
        [
            cell("shrink", {"csgmv": 8.0, "vllm_tuned": 4.0, "auto": 2.0, "custom": 1.0}),
            cell("shrink", {"csgmv": 8.0, "vllm": None, "auto": 1.0, "custom": 2.0}, tokens=32),
            cell("shrink", {"csgmv": 99.0, "auto": 1.0}, rank=64, capacity=64),  # not of the paper's grid
            cell("shrink", {"csgmv": 9.0, "auto": 3.0}, phase="prefill", capacity=128),
        ],
    )
    assert found["geomean.shrink_decode"] == pytest.approx(4.0)  # of 2 and 8
    assert found["geomean.shrink_decode.over_shipped"] == pytest.approx((4 * 8) ** 0.5)
    assert found["geomean.shrink_decode.custom"] == pytest.approx(4.0)
    assert found["geomean.shrink_decode.flushed"] == pytest.approx(4.0)
    assert found["times_floor.shrink_decode.auto"] == pytest.approx(2**0.5)
    assert found["cases.shrink_decode"] == 2
    assert found["geomean.shrink_prefill_cap128"] == pytest.approx(3.0)
    assert "geomean.shrink_prefill" not in found
    assert (found["cases"], found["cases_failed"], found["native_failures"]) == (4, 0, 1)


def test_the_ablation_compares_limits_staging_and_native() -> None:
    arms = {f"staged{limit}": 8.0 / index for index, limit in enumerate((1, 4, 8, 16), start=1)}
    arms |= {f"unstaged{limit}": 8.0 for limit in (1, 4, 8, 16)}
    resources = {
        "record": "resources", "staged": True, "width": 8, "threads": 256, "registers": 40, "local_bytes": 0,
        "shared_bytes": 1024, "blocks_per_sm": 4, "occupancy": 0.5,
    }  # fmt: skip
    found = summary(
        "expand_ablation",
        [
            cell("expand", {"csgmv": 3.0, **arms}, group="ablation"),
            cell("expand", {"csgmv": 12.0, **arms}, group="ablation", phase="prefill"),
            resources,
        ],
    )
    assert found["ablation.all.staged16.over_limit1"] == pytest.approx(4.0)
    assert found["ablation.all.staged16.over_unstaged"] == pytest.approx(4.0)
    assert found["ablation.decode.staged16.over_native"] == pytest.approx(1.5)
    assert found["ablation.all.staged16.over_native"] == pytest.approx(3.0)
    assert found["ablation.all.cases"] == 2
    assert "ablation.all.unstaged4.over_unstaged" not in found
    assert found["resources.staged.width8.occupancy"] == 0.5


def test_the_worst_cell_and_whole_layers() -> None:
    layer = [
        cell("lora", {"csgmv": 20.0, "auto": 5.0}, group="layer", layer="rank8", projection=name)
        for name in ("qkv", "o", "gate_up", "down")
    ]
    whole = cell("lora", {"csgmv": 70.0, "auto": 18.0}, group="layer", layer="rank8", projection="layer")
    found = summary(
        "dispatch",
        [
            cell("lora", {"csgmv": 9.0, "triton_v2": 10.0, "auto": 10.0}),
            cell("lora", {"csgmv": 30.0, "auto": 10.0}, rank=64, capacity=64),
            *layer,
            whole,
        ],
    )
    assert found["worst_cell"] == pytest.approx(0.9)
    assert found["cells_above_097"] == 0.5
    assert found["geomean.lora"] == pytest.approx(2.7**0.5)
    assert found["decode_layer_us.rank8"] == pytest.approx(20.0)
    assert found["decode_layer_us.rank8.csgmv"] == pytest.approx(80.0)
    assert found["decode_layer_us.rank8.flushed"] == pytest.approx(40.0)
    assert found["decode_layer_us.rank8.sequence"] == pytest.approx(18.0)
    assert found["decode_layer_us.rank8.floor"] == pytest.approx(4.0)


def test_a_failure_of_ours_is_a_failed_case_and_a_broken_claim() -> None:
    kind = TARGETS["dispatch"]
    records = [
        SETTING,
        cell("lora", {"csgmv": 9.0, "auto": None}),
        cell("lora", {"csgmv": None, "auto": 1.0}, rank=4),
    ]
    found = kind.parse([json.dumps(record) for record in records], "records.jsonl")
    assert kind.summarise(found, "none")["cases_failed"] == 2
    assert not kind.claims(found)[0].passed


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"warm_us": []}, "timed without"),
        ({"passed": False}, "timed without"),
        ({"relative_l2": 0.02}, "passed with an error of 0.02"),
        ({"warm_us": [1.0, -1.0]}, "greater than 0"),
    ],
)
def test_records_that_contradict_themselves_are_refused(change: dict[str, Any], what: str) -> None:
    record = cell("lora", {"csgmv": 9.0})
    record["arms"][0] |= change
    with pytest.raises(InputError, match=what):
        TARGETS["dispatch"].parse([json.dumps(record)], "records.jsonl")


def test_a_case_is_stated_once_and_a_run_has_one_setting() -> None:
    kind = TARGETS["dispatch"]
    one = cell("lora", {"csgmv": 9.0, "auto": 1.0})
    for records, what in (
        ([SETTING, one, one], "twice"),
        ([one], "lacks the setting"),
        ([SETTING], "no timed case"),
    ):
        found = kind.parse([json.dumps(record) for record in records], "records.jsonl")
        with pytest.raises(InputError, match=what):
            kind.check(found, "records.jsonl")
