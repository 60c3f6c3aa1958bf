"""Where no policy is named, the study's choice among those of the norm that there is to measure in."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tiny_model import PROMPTS

from loraforge.activation.fisher_collection import FisherSettings, collect_fisher
from loraforge.activation.inputs import collect_moments
from loraforge.allocate.allocation import load_allocation
from loraforge.allocate.budget import parse_budget
from loraforge.allocate.policies import DEFAULT_POLICY, RULES, Norm
from loraforge.cli import main
from loraforge.compress import compress
from loraforge.config import Policy
from loraforge.errors import InputError, UsageError
from loraforge.evidence.index import current_bags
from loraforge.evidence.targets.study import (
    QualitySelectionTarget,
    Record,
    scores_of,
    selection_from,
    selection_of,
)
from loraforge.export.manifest import load_manifest
from loraforge.fleet.peft_io import open_fleet
from loraforge.preview import preview

ROOT = Path(__file__).resolve().parents[2]
NORMS = list(DEFAULT_POLICY)
BUDGET = parse_budget("1/2")


def make_moments(norm: Norm, base: Path, fleet_folder: Path, tmp_path: Path) -> Path | None:
    """A file of the collectors' own making; None where weights are all that is measured."""
    path = tmp_path / "moments.safetensors"
    if norm == "activations":
        collect_moments(base, ["A text.", "Another."], path)
    elif norm == "fisher":
        settings = FisherSettings(draws=1, max_new_tokens=2, batch_size=2)
        fleet = open_fleet([fleet_folder])
        collect_fisher(base, fleet, PROMPTS, path, cache=tmp_path / "collected", settings=settings)
    return path if path.exists() else None


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return int(caught.value.code or 0)


@pytest.fixture(scope="module")
def selection_records() -> list[Record]:
    """Records of the current selection on the machine that scored every candidate."""
    bag = current_bags(ROOT / "evidence")["quality_selection", "h200"]
    return QualitySelectionTarget().read(ROOT / "evidence/quality_selection" / bag / "data/records.jsonl")


@pytest.mark.parametrize("norm", NORMS)
def test_defaults_are_those_that_validation_scores_choose(
    selection_records: list[Record], norm: Norm
) -> None:
    """By the selection's own rule, with the candidates of one norm in place of all."""
    stated = selection_of(selection_records)
    rules = {str(name): rule for name, rule in RULES.items()}
    candidates = [one.policy for one in stated.candidates if rules[one.policy].norm == norm]
    assert len(candidates) > 1
    again = selection_from(
        scores_of(selection_records),
        fleet=stated.fleet,
        candidates=candidates,
        decide_at=stated.decide_at,
        finalists=1,
    )
    assert again.chosen == DEFAULT_POLICY[norm], [(one.policy, one.macro) for one in again.candidates]


def test_there_is_a_default_for_every_norm() -> None:
    assert {name: RULES[policy].norm for name, policy in DEFAULT_POLICY.items()} == {n: n for n in NORMS}
    assert set(NORMS) == {rule.norm for rule in RULES.values()}


@pytest.mark.parametrize("command", ["compress", "allocate"])
def test_help_names_the_defaults(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "--help") == 0
    (stated,) = re.findall(r"--policy .*?\[default: \((.*?)\)\]", " ".join(capsys.readouterr().out.split()))
    named = re.findall("|".join(sorted(RULES, key=len, reverse=True)), stated)
    assert named == [DEFAULT_POLICY[norm] for norm in NORMS]


@pytest.mark.parametrize("norm", NORMS)
def test_the_command_line_goes_by_the_norm_of_the_file(
    norm: Norm, base: Path, fleet_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moments = make_moments(norm, base, fleet_folder, tmp_path)
    given = () if moments is None else ("--moments", moments)
    common = (fleet_folder, "--budget", "1/2", "--cache", tmp_path / "cache", *given)
    out, ranks, default = tmp_path / "out", tmp_path / "ranks.json", DEFAULT_POLICY[norm]

    assert run("compress", *common, "--out", out, "--dry-run", "--json") == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["policy"] == default
    assert run("compress", *common, "--out", out) == 0
    assert f"{default}, fraction 1/2, rank floor 1" in capsys.readouterr().out
    manifest = load_manifest(out)
    assert manifest.fleet.policy == default
    assert run("allocate", *common, "-o", ranks) == 0
    assert f"{ranks}: {default} at 1/2: " in capsys.readouterr().err
    allocation = load_allocation(ranks)
    assert allocation.policy == default
    assert run("allocate", *common, "--policy", default, "-o", tmp_path / "named.json") == 0
    assert load_allocation(tmp_path / "named.json").ranks == allocation.ranks == planned["retained"]
    assert allocation.ranks == {
        name: {module: kept.k for module, kept in entry.modules.items()}
        for name, entry in manifest.adapters.items()
    }


@pytest.mark.parametrize("norm", NORMS)
def test_the_functions_do_the_same(norm: Norm, base: Path, fleet_folder: Path, tmp_path: Path) -> None:
    moments = make_moments(norm, base, fleet_folder, tmp_path)
    default = DEFAULT_POLICY[norm]
    planned = preview([fleet_folder], BUDGET, tmp_path / "out", cache=None, moments=moments)
    done = compress([fleet_folder], BUDGET, tmp_path / "out", cache=None, moments=moments)
    assert planned.choice.allocation == done.choice.allocation
    assert done.manifest.fleet.policy == default
    named = preview([fleet_folder], BUDGET, tmp_path / "new", cache=None, policy=default, moments=moments)
    assert named.choice.allocation == done.choice.allocation


def test_a_file_that_has_changed_settles_nothing(
    base: Path, fleet_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moments = make_moments("fisher", base, fleet_folder, tmp_path)
    assert moments is not None
    raw = bytearray(moments.read_bytes())
    raw[-1] ^= 1
    moments.write_bytes(raw)
    capsys.readouterr()
    assert run("allocate", fleet_folder, "--budget", "1/2", "--moments", moments, "-o", tmp_path / "k") == 4
    assert capsys.readouterr().err.startswith(f"error: {moments}: ")


@pytest.mark.parametrize("norm", ["activations", "fisher"])
def test_a_policy_that_is_named_is_never_replaced(
    norm: Norm, base: Path, fleet_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moments = make_moments(norm, base, fleet_folder, tmp_path)
    other: Policy = "fisher" if norm == "activations" else "activation"
    before = sorted(tmp_path.iterdir())
    for policy, words in (("spectral", "measures weights alone"), (other, f"is for {norm} policies")):
        common = (fleet_folder, "--budget", "1/2", "--policy", policy, "--moments", moments)
        assert run("compress", *common, "--no-cache", "--out", tmp_path / "out") == 2
        assert run("allocate", *common, "--cache", tmp_path / "cache", "-o", tmp_path / "ranks.json") == 2
        told = capsys.readouterr().err
        assert told.count(f"error: --moments: the {policy} policy ") == told.count(words) == 2
    with pytest.raises(UsageError, match="the spectral policy measures weights alone"):
        compress([fleet_folder], BUDGET, tmp_path / "out", cache=None, policy="spectral", moments=moments)
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_of_no_norm_is_refused_before_the_work(
    fleet_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = fleet_folder / "a" / "adapter_model.safetensors"
    (tmp_path / "text").write_text("no moments")
    before = sorted(tmp_path.iterdir())
    for moments in (weights, tmp_path / "text", tmp_path / "none", fleet_folder):
        common = (fleet_folder, "--budget", "1/2", "--moments", moments, "--cache", tmp_path / "cache")
        assert run("compress", *common, "--out", tmp_path / "out") == 3
        assert run("compress", *common, "--out", tmp_path / "out", "--dry-run") == 3
        assert run("allocate", *common, "-o", tmp_path / "ranks.json") == 3
        told = capsys.readouterr().err.splitlines()
        assert len(told) == 3
        assert all(line.startswith(f"error: {moments}: ") for line in told), told
        with pytest.raises(InputError):
            preview([fleet_folder], BUDGET, tmp_path / "out", cache=None, moments=moments)
    assert sorted(tmp_path.iterdir()) == before
