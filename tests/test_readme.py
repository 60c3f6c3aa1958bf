"""The README's numbers are those of the current evidence, its files exist, its snippet's paths are the workflow's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loraforge.evidence.index import current_bags

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BAGS = current_bags(ROOT / "evidence")


def summary(target: str, host: str) -> dict[str, Any]:
    bag = current(target, host)
    assert bag.relative_to(ROOT).as_posix() in README
    return values_of(bag)


def current(target: str, host: str) -> Path:
    return ROOT / "evidence" / target / BAGS[target, host]


def values_of(bag: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((bag / "data/summary.json").read_text())
    return found


def signed(value: float) -> str:
    text = f"{value:.1f}".replace("-", "−")
    return "0.0" if text == "−0.0" else text


@pytest.mark.parametrize(
    ("title", "policy"),
    [("uniform", "uniform"), ("spectral", "spectral"), ("spectral, no floor", "spectral-nofloor")],
)
def test_scores_are_those_of_the_evidence(title: str, policy: str) -> None:
    values = summary("quality", "h200")
    cells = []
    for budget in ("1/12", "1/8", "1/4", "1/2"):
        key = f"quality.{policy}.{budget}"
        low, high = signed(values[f"{key}.ci_low"]), signed(values[f"{key}.ci_high"])
        cells.append(f"{values[f'{key}.macro']:.1f} [{low}, {high}] {values[f'{key}.over5']}")
    assert f"| {title} | {' | '.join(cells)} |" in README
    assert (
        f"({values['quality.original.1.macro']:.1f}; the base model has {values['quality.base.0.macro']:.1f})"
        in (README.replace("\n", " "))
    )


@pytest.mark.parametrize("fleet", ["qwen50", "llama35"])
def test_seconds_are_those_of_the_evidence(fleet: str) -> None:
    values = summary("recompression", "h200")
    seconds = [values[f"{fleet}.{method}_s"] for method in ("gram", "gram_deferred", "tsqr", "fraq")]
    cells = [f"{value:.3f}" if value < 1 else f"{value:.2f}" for value in seconds]
    row = next(line for line in README.splitlines() if line.startswith(f"| {fleet}: "))
    assert row.startswith(f"| {fleet}: {values[f'{fleet}.matrices']:,} matrices, ")
    assert row.endswith(f" | {' | '.join(cells)} |")


COMPARED = (
    ("geomean", ""),
    ("geomean", ".over_csgmv"),
    ("times_floor", ".auto"),
    ("times_floor", ".native"),
)
SHRINKS = ("shrink_decode", "shrink_prefill", "shrink_prefill_cap128")
PAGES = {
    **dict.fromkeys(
        ("cpu_serving", "mixed_serving_vllm", "mixed_serving_sglang", "six_cell", "residency"),
        "docs/serving_experiments.md",
    ),
    "quality_study": "docs/quality.md",
    "scale": "docs/scale.md",
}
CPU_ARMS = ("original_native", "original_loraforge", "spectral_loraforge", "base_only")
MIXED_ARMS = ("original_native", "spectral_loraforge", "base_only")
SIX_CELLS = (
    *("original_native", "original_loraforge", "uniform_native", "uniform_loraforge"),
    *("spectral_native", "spectral_loraforge"),
)
RESIDENT_ARMS = (
    *("original_native", "original_native_full", "original_loraforge_full"),
    *("spectral_native_full", "spectral_loraforge_full"),
)
CPU_RATIOS = ("execution_original", "s12_over_original", "s12_over_base", "original_over_base")
# (target, machine) -> what docs/kernels.md, or the target's own page, states of it
MEASURED = {
    ("dispatch", "h200"): (
        *("decode_layer_us.rank8", "decode_layer_us.rank8.floor", "decode_layer_us.rank8.sequence"),
        *("decode_layer_us.rank8.triton_v2", "decode_layer_us.rank8.csgmv"),
        *("decode_layer_us.spectral12", "decode_layer_us.spectral12.floor"),
        *("decode_layer_us.spectral12.triton_v2", "decode_layer_us.spectral12.csgmv"),
        *("prefill_layer_us.rank8", "prefill_layer_us.rank8.floor"),
        *("prefill_layer_us.rank8.triton_v2", "prefill_layer_us.rank8.csgmv"),
        *("worst_cell", "cells_above_097", "worst_cell_flushed", "worst_cell.over_csgmv"),
        *("geomean.lora", "geomean.lora_flushed", "geomean.lora.over_csgmv", "cases", "cases_failed"),
    ),
    ("shrink_ablation", "h200"): (
        *(f"{what}.{grid}{which}" for grid in SHRINKS for what, which in COMPARED),
        *("cases", "cases_failed"),
    ),
    ("expand_ablation", "h200"): (
        *(
            f"{what}.{grid}{which}"
            for grid in ("expand_decode", "expand_prefill")
            for what, which in COMPARED
        ),
        *("ablation.all.staged16.over_limit1", "ablation.prefill.staged16.over_limit1"),
        *(
            "ablation.all.staged16.over_unstaged",
            "ablation.all.staged16.over_native",
            "cases",
            "cases_failed",
        ),
    ),
    ("scale", "cpu2"): (
        *(
            f"adapters_{size}.{name}"
            for size in (10, 100, 1000)
            for name in (
                *("modules", "factor_s", "factor_cpu_s", "peak_gib", "baseline_gib", "allocate_s"),
                *("choice_s", "add_one_s", "add_one_cpu_s", "remove_one_s", "remove_one_cpu_s"),
                *("rebudget_s", "rebudget_cpu_s"),
            )
        ),
        *("peak_mib_an_adapter", "rank", "parameters", "threads"),
    ),
    ("quality_study", "h200"): (
        *("reach.drop", "reach.drop_over_spectral", "reach.worst", "reach.worst_over_uniform"),
        *("reach.n_over_5", "reach.cts_drop_over_drop"),
    ),
    ("cpu_serving", "cpu2"): (
        *(f"tok_s.{arm}.{rate}" for rate in (4, 32, 1000) for arm in CPU_ARMS),
        *(f"tpot_p99_ms.{arm}.32" for arm in CPU_ARMS),
        *(f"ratio.{name}.{rate}" for rate in (32, 1000) for name in CPU_RATIOS),
        *(f"pool_bytes.{arm}" for arm in CPU_ARMS[:3]),
        "failed",
    ),
    ("mixed_serving_vllm", "vllm-h200"): (
        *(f"tok_s.{arm}.{rate}" for rate in (32, 128, 256) for arm in (*MIXED_ARMS, "spectral_native")),
        *(f"ratio.{name}.{rate}" for rate in (128, 256) for name in ("s12_over_original", "execution_only")),
        *(f"ratio.s12_over_base.{rate}" for rate in (32, 64, 128, 256)),
        *(f"tpot_p99_ms.{arm}.128" for arm in MIXED_ARMS),
        "tpot_ratio.s12_over_original.128",
        *(f"loads.{arm}.128" for arm in MIXED_ARMS[:2]),
        *(f"pool_bytes.{arm}.{fleet}" for arm in MIXED_ARMS[:2] for fleet in ("qwen50", "llama35")),
        *(f"peak_gib.{arm}" for arm in MIXED_ARMS[:2]),
        "failed",
    ),
    ("mixed_serving_sglang", "sglang-h200"): (
        *(f"tok_s.{arm}.{rate}" for rate in (32, 64, 128) for arm in MIXED_ARMS),
        *(f"ratio.{name}.{rate}" for rate in (64, 128) for name in ("s12_over_original", "s12_over_base")),
        *(f"tpot_p99_ms.{arm}.128" for arm in MIXED_ARMS),
        "tpot_ratio.s12_over_original.128",
        *(f"loads.{arm}.128" for arm in MIXED_ARMS[:2]),
        *(f"pool_bytes.{arm}.qwen50" for arm in MIXED_ARMS[:2]),
        *(f"peak_gib.{arm}" for arm in MIXED_ARMS[:2]),
        "failed",
    ),
    ("six_cell", "vllm-h200"): (
        *(f"tok_s.{arm}.128" for arm in SIX_CELLS),
        *(f"ratio.execution_{weights}.128" for weights in ("original", "uniform", "only")),
        "ratio.s12_over_original.128",
        *(f"tpot_p99_ms.{arm}.128" for arm in SIX_CELLS),
        *(f"{key}.{arm}" for key in ("pool_bytes", "peak_gib") for arm in SIX_CELLS),
        "failed",
    ),
    ("residency", "vllm-h200"): (
        *(f"tok_s.{arm}.128" for arm in RESIDENT_ARMS),
        *("ratio.full_over_limited.original_native.128", "ratio.execution_original.full.128"),
        *("ratio.execution_only.full.128", "ratio.s12_over_original.full.128"),
        *(f"tpot_p99_ms.{arm}.128" for arm in RESIDENT_ARMS),
        *(f"loads.{arm}.128" for arm in RESIDENT_ARMS[:2]),
        *("source_gib.original_native.128", "failed"),
    ),
    ("cpu_ops", "cpu2"): ("geomean.decode", "geomean.prefill", "worst_cell.decode", "cases", "cases_failed"),
}
REFINED_ARM = "fisher-nofloor-refined"
REPORTED = (
    *("uniform", "spectral", "spectral-nofloor", "para", "para-fleet", "sv-ratio", "sv-cumulative", "sv-fro"),
    *("fisher-sqrt", "fisher-nofloor", "fisher", "fisher-relative", REFINED_ARM),
    *("cts", "cts-weighted", "cts-diagonal"),
)
ROW = re.compile(r"^\| `([\w./-]+)` \| (-?[\d.,]+) \|$", re.MULTILINE)


def shown(value: float) -> str:
    """A count whole; other numbers to about three digits, so that 0.966 is no 0.97."""
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    return f"{value:,.{0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3}f}"


def test_numbers_are_shown_to_three_digits() -> None:
    assert [shown(value) for value in (1440, 0.973, 2.306, 44.91, 182.4, -5.61)] == [
        "1,440",
        "0.973",
        "2.31",
        "44.9",
        "182",
        "-5.61",
    ]
    assert ROW.findall("| `a.b8` | 1,440 |\n| key | value |\n| `c.1/12` | -0.97 |") == [
        ("a.b8", "1,440"),
        ("c.1/12", "-0.97"),
    ]


@pytest.mark.parametrize(("target", "host"), list(MEASURED))
def test_the_table_of_a_study_is_that_of_its_current_evidence(target: str, host: str) -> None:
    name = PAGES.get(target, "docs/kernels.md")
    page = (ROOT / name).read_text(encoding="utf-8")
    stated = re.search(rf"^From `evidence/{target}/([\w-]+)`:\n\n((?:\|.*\n)+)", page, re.MULTILINE)
    if (target, host) not in BAGS:
        assert stated is None, f"{name} states numbers of {target}, of which there is no evidence"
        pytest.skip(f"no evidence of {target} on {host} yet")
    bag = current(target, host)
    values = values_of(bag)
    rows = "".join(f"| `{key}` | {shown(values[key])} |\n" for key in MEASURED[target, host])
    wanted = f"From `evidence/{target}/{bag.name}`:\n\n| key | value |\n|---|---|\n{rows}"
    assert wanted in page, f"{name}, section Measured, should have:\n\n{wanted}"
    assert stated is not None
    assert len(ROW.findall(stated[2])) == len(MEASURED[target, host])


def test_serving_on_a_gpu_is_that_of_its_evidence() -> None:
    vllm = values_of(current("mixed_serving_vllm", "vllm-h200"))
    sglang = values_of(current("mixed_serving_sglang", "sglang-h200"))
    over, base = (
        [values[f"ratio.{name}.128"] for values in (vllm, sglang)]
        for name in ("s12_over_original", "s12_over_base")
    )
    words = README.replace("\n", " ")
    assert f"{over[0]:.1f} times (vLLM) and {over[1]:.1f} times (SGLang) the output tokens" in words
    assert f"{base[0]:.2f} and {base[1]:.2f} times the base models'" in words


def rows_of_candidates() -> str:
    bag = current("quality_selection", "h200")
    values = values_of(bag)
    lines = (json.loads(line) for line in (bag / "data/records.jsonl").read_text().splitlines())
    [selection] = [record for record in lines if record.get("record") == "selection"]
    rows = "| policy | mean | worst | over 5 |\n|---|---|---|---|\n"
    for one in selection["candidates"]:
        key = f"quality.{one['policy']}.1/12"
        cells = signed(values[f"{key}.delta"]), signed(values[f"{key}.worst"])
        rows += f"| `{one['policy']}` | {cells[0]} | {cells[1]} | {values[f'{key}.n_over_5']} |\n"
    return rows


def rows_of_arms() -> str:
    values = values_of(current("quality_study", "h200"))
    rows = "| arm | 1/24 | 1/12 | worst | over 5 | 1/8 | 1/4 | 1/2 |\n|---|---|---|---|---|---|---|---|\n"
    for arm in REPORTED:
        key = f"quality.{arm}."
        means = {
            budget: signed(values[f"{key}{budget}.delta"]) if f"{key}{budget}.delta" in values else "–"
            for budget in ("1/24", "1/12", "1/8", "1/4", "1/2")
        }
        low, high, worst = (signed(values[f"{key}1/12.{name}"]) for name in ("ci.low", "ci.high", "worst"))
        cells = [means["1/24"], f"{means['1/12']} [{low}, {high}]", worst, str(values[f"{key}1/12.n_over_5"])]
        cells += [means["1/8"], means["1/4"], means["1/2"]]
        rows += f"| `{arm}` | {' | '.join(cells)} |\n"
    return rows


@pytest.mark.parametrize("rows", [rows_of_candidates, rows_of_arms])
def test_the_tables_of_the_quality_study_are_those_of_the_evidence(rows: Callable[[], str]) -> None:
    wanted = rows()
    page = (ROOT / "docs/quality.md").read_text(encoding="utf-8")
    assert f"\n\n{wanted}\n" in page, f"docs/quality.md, section Measured, should have:\n\n{wanted}"


def test_the_study_in_the_readme_is_that_of_the_evidence() -> None:
    values = summary("quality_study", "h200")
    text = README.replace("\n", " ")

    def lost(arm: str) -> str:
        return f"{-values[f'quality.{arm}.1/12.delta']:.1f}"

    refined = f"{REFINED_ARM}.1/12"
    assert f"loses {lost('fisher-sqrt')} points at 1/12 where spectral loses {lost('spectral')}" in text
    assert f"and uniform {lost('uniform')}" in text
    assert f"{lost(REFINED_ARM)} points remain, {values[f'quality.{refined}.worst']:.1f} of the worst" in text
    assert values[f"quality.{refined}.n_over_5"] == 0
    best = min(float(lost(arm)) for arm in ("cts", "cts-weighted", "cts-diagonal"))
    assert f"lose {best:.1f} or more" in text


def test_every_adapter_beats_the_base_on_its_own_test_set() -> None:
    bag = ROOT / "evidence/quality/20261130-h200/data/records.jsonl"
    scores: dict[str, dict[str, float]] = {}
    for line in bag.read_text().splitlines():
        record = json.loads(line)
        scores.setdefault(record["adapter"], {})[record["arm"]] = record["score"]
    assert len(scores) == 24
    for adapter, arms in scores.items():
        assert arms["original"] > arms["base"] + 5, adapter


def test_files_that_the_documents_name_exist() -> None:
    for page in (
        "README.md",
        "docs/architecture.md",
        "docs/kernels.md",
        "docs/quality.md",
        "docs/serving.md",
        "config/README.md",
        "CONTRIBUTING.md",
        "envs/README.md",
    ):
        text = (ROOT / page).read_text(encoding="utf-8")
        for path in re.findall(
            r"`((?:docs|config|envs|evidence|scripts|tests|loraforge|workflow)/[\w./-]+)`", text
        ):
            place = path.rstrip("/")
            assert (ROOT / place).exists() or (ROOT / place).parent.is_dir(), (page, path)
    for image in re.findall(r"!\[[^]]*\]\(([^)]+)\)", README):
        assert (ROOT / image).is_file()


def test_the_chain_from_files_to_files_is_that_of_the_evidence() -> None:
    values = summary("end_to_end_compression", "h200")
    text = README.replace("\n", " ")
    assert f"`compress --no-cache` takes {values['qwen50.end_to_end_s']:.1f} s" in text
    assert f"too, {values['qwen50.cached.end_to_end_s']:.1f} s (" in text
    for stage, words in (
        ("hash", "are hashing"),
        ("load", "loading"),
        ("factor", "factorisation"),
        ("export", "export"),
    ):
        assert f"{values[f'qwen50.{stage}_s']:.2f} s {words}" in text, stage
