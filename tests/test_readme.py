"""The README's numbers are those of the current evidence, its files exist, its snippet's paths are the workflow's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def summary(target: str, host: str) -> dict[str, Any]:
    index = (ROOT / "evidence/INDEX.sha256").read_text()
    match = re.search(rf"^# current {target} {host} (\S+)$", index, re.MULTILINE)
    assert match, (target, host)
    assert f"evidence/{target}/{match[1]}" in README
    found: dict[str, Any] = json.loads(
        (ROOT / "evidence" / target / match[1] / "data/summary.json").read_text()
    )
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
