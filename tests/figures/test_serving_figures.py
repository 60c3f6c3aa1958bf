"""Figures of serving say which engine served what, how lengths were fixed, and what deviates over seeds."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from synthetic_serving import ARMS, REAL, SGLANG, serving

from loraforge.evidence.tables import Table, from_csv, to_csv
from loraforge.evidence.targets import TARGETS
from loraforge.figures import module_of, style, table_of
from loraforge.figures import serving as shared

CONTEXT = style.Context("smol", "h200", "NVIDIA H200", "2026-11-29", "reduced")
TABLES = ("stopping_contract", "adapters_500")
BARS = ("six_cell", "fixed_work", "residency")


def made(target: str, records: list[dict[str, Any]]) -> Table:
    parsed = TARGETS[target].parse([json.dumps(record) for record in records], "records")
    return from_csv(to_csv(table_of(target, parsed)), "table")


def words_of(target: str, table: Table, tmp_path: Path) -> str:
    style.save(module_of(target).draw(table, CONTEXT), tmp_path / "f.svg", tmp_path / "f.png")
    return " ".join(" ".join(ET.parse(tmp_path / "f.svg").getroot().itertext()).split())


@pytest.mark.parametrize("target", list(ARMS))
def test_engine_device_lengths_and_deviations_are_said(target: str, tmp_path: Path) -> None:
    words = words_of(target, made(target, serving(target)), tmp_path)
    assert ("sglang 0.5.22, fleet" if target in SGLANG else "vllm 0.26.0, fleet") in words
    assert "NVIDIA H200 (h200), 2026-11-29" in words
    assert "log-normal, mean 50, 1–512 tokens" in words
    assert ("Output lengths are fixed" in words) == (target not in REAL)
    assert ("Answers end by themselves" in words) == (target in REAL)
    assert ("repeats the lengths of: Spectral, LoRAForge" in words) == (target in REAL)
    assert ("Shape fleets: random base weights" in words) == (target not in REAL)
    assert f"{'±' if target in TABLES else 'Whiskers'}: standard deviation over seeds" in words
    assert "Compressed weights have a budget of 1/12" in words


def test_one_seed_has_no_deviation(tmp_path: Path) -> None:
    table = made("cpu_serving", serving("cpu_serving", seeds=(101,)))
    assert all(row["std"] is None for row in table)
    assert "Whiskers" not in words_of("cpu_serving", table, tmp_path)


def test_the_table_has_means_deviations_and_gains() -> None:
    records = serving("mixed_serving_vllm")
    for record in records:
        if record["record"] == "point" and record["rate"] == 16.0:
            even = record["seed"] == 102
            speed = {"original_native": 100.0, "spectral_loraforge": 150.0}.get(record["arm"], 120.0)
            record["figures"]["tok_s"] = speed + (20.0 if even else 0.0)
    rows = {
        (row["panel"], row["arm"], row["name"], row["rate"]): row
        for row in made("mixed_serving_vllm", records)
    }
    average = rows["tok_s", "original_native", None, 16]
    assert (average["value"], average["n"]) == (pytest.approx(110.0), 2)
    assert average["std"] == pytest.approx(20 / 2**0.5)
    gain = rows["gain", "spectral_loraforge", "original_native", 16]
    assert gain["value"] == pytest.approx((1.5 * 170 / 120) ** 0.5)
    assert rows["pool_gib", "original_native", None, None]["value"] == pytest.approx(24.0)


def test_failures_and_missing_points_are_said(tmp_path: Path) -> None:
    records = serving("mixed_serving_vllm")
    records[2]["figures"] = records[2]["figures"] | {"failed": 3}
    records[-1]["stopped"] = "interrupted by SIGTERM"
    words = words_of("mixed_serving_vllm", made("mixed_serving_vllm", records), tmp_path)
    assert "3 of 30,600 requests failed" in words
    assert "2 of 20 points are not shown" in words


@pytest.mark.parametrize("target", BARS)
def test_every_arm_has_a_bar_and_memory_is_shown_once(target: str) -> None:
    table = made(target, serving(target))
    figure = module_of(target).draw(table, CONTEXT)
    drawn = [axes for axes in figure.axes if axes.axison]
    rates = {row["rate"] for row in table if row["panel"] == "tok_s"}
    throughput = [axes for axes in drawn if axes.get_title(loc="left").endswith("Throughput")]
    assert len(throughput) == len(rates)
    for axes in throughput:
        assert [label.get_text() for label in axes.get_yticklabels()] == [
            shared.label_of(arm) for arm in ARMS[target]
        ]
        assert len(axes.patches) == len(ARMS[target])
    once = [
        axes
        for axes in drawn
        if axes.get_title(loc="left").split(" ", 1)[1] in ("Peak allocated", "Held for LoRA")
    ]
    assert len(once) == (target != "fixed_work")


def test_bars_name_what_execution_alone_gains(tmp_path: Path) -> None:
    table = made("six_cell", serving("six_cell"))
    gains = {
        (row["arm"], row["rate"]): row["value"]
        for row in table
        if row["panel"] == "gain" and str(row["name"]).endswith("_native") and row["arm"] != "spectral_native"
        and str(row["arm"]).split("_")[0] == str(row["name"]).split("_")[0]
    }  # fmt: skip
    assert len(gains) == 6
    words = words_of("six_cell", table, tmp_path)
    for value in gains.values():
        assert f"({float(value or 0):.2f}×)" in words


def test_gains_are_told_by_rising_rates_whichever_was_measured_first(tmp_path: Path) -> None:
    table = made("six_cell", serving("six_cell"))
    words = words_of("six_cell", table[::-1], tmp_path)
    assert re.search(r"Spectral, LoRAForge over Original, native [\d.]+× at 16, [\d.]+× at 32", words)


def test_arms_differ_in_marker_and_in_line_or_hatch() -> None:
    looks = list(shared.ARMS.values())
    assert len({look.marker for look in looks}) == len(looks)
    for weights in ("original", "uniform", "spectral"):
        native, ours = (shared.ARMS[f"{weights}_{by}"] for by in ("native", "loraforge"))
        assert native.line != ours.line
        assert native.hatch != ours.hatch


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1234.4, "1,234"), (99.6, "100"), (20.4, "20"), (7.84, "7.8"), (0.123, "0.12")],
)
def test_values_are_shown_to_two_or_three_digits(value: float, text: str) -> None:
    assert shared.shown(value) == text


PRINTED = {
    "mixed_serving_sglang_table": ("mixed_serving_sglang", 1),
    "six_cell_table": ("six_cell", 2),
    "fixed_work_table": ("fixed_work", 2),
    "stopping_contract": ("stopping_contract", 1),
    "single_fleet_table": ("single_fleet", 2),
    "adapters_500": ("adapters_500", 1),
}


@pytest.mark.parametrize("figure", PRINTED)
def test_a_printed_table_has_every_case_and_its_throughput(figure: str, tmp_path: Path) -> None:
    target, blocks = PRINTED[figure]
    parsed = TARGETS[target].parse([json.dumps(record) for record in serving(target)], "records")
    table = from_csv(to_csv(table_of(figure, parsed)), "table")
    words = words_of(figure, table, tmp_path)
    rates = sorted({row["rate"] for row in table if str(row["panel"]).endswith("tok_s")})
    shown = [
        row
        for row in table
        if str(row["panel"]).endswith("tok_s")
        and ((blocks == 2 and "single" not in figure) or row["rate"] == rates[-1])
    ]
    assert len(shown) == len({row["arm"] for row in shown}) * blocks
    for row in shown:
        assert words.count(shared.label_of(str(row["arm"]))) >= blocks
        assert f"{shared.shown(float(row['value'] or 0))} ± {shared.shown(float(row['std'] or 0))}" in words
    if figure == "stopping_contract":
        assert "N: requests declare 837 (qwen50) and 428 (llama35) tokens" in words
    assert figure in module_of(figure).__name__
    assert figure in TARGETS[target].figures


def test_each_fleet_alone_has_a_row_of_panels() -> None:
    figure = module_of("single_fleet").draw(made("single_fleet", serving("single_fleet")), CONTEXT)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[0] == "(a) Throughput, qwen50"
    assert titles[-1] == "(f) TPOT P99, llama35"


def test_copies_and_ways_are_in_labels_and_change_no_look() -> None:
    assert shared.label_of("spectral_loraforge_x10") == "Spectral, LoRAForge, 10 names each"
    assert shared.label_of("base_only.exact-eos") == "Base model alone, E-N"
    assert shared.look_of("original_native_full.early") is shared.ARMS["original_native"]
