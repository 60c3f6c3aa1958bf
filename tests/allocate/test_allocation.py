"""The stage as a user runs it: folders in, an allocation file and evidence records out."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_folders import MakeAdapter

from loraforge.allocate.allocation import AllocationFile, allocation_file, load_allocation, save_allocation
from loraforge.allocate.budget import parse_budget
from loraforge.allocate.options import Options
from loraforge.allocate.policy import allocate, allocation_records
from loraforge.allocate.problem import Problem
from loraforge.allocate.uniform import uniform
from loraforge.cli import main
from loraforge.config import Policy
from loraforge.errors import BudgetError, InputError
from loraforge.fleet.peft_io import open_adapter


@pytest.fixture
def small() -> Problem:
    names = [("x", "model.layers.0.q_proj"), ("x", "model.layers.1.q_proj"), ("y", "model.layers.0.v_proj")]
    rank, cost = np.array([4, 8, 6]), np.array([10, 10, 7])
    generator = np.random.default_rng(3)
    sigma = np.concatenate([np.sort(generator.exponential(size=r))[::-1] for r in rank])
    return Problem(names, rank, cost, sigma)


@pytest.mark.parametrize("policy", ["uniform", "spectral", "spectral-nofloor"])
def test_file_round_trip(tmp_path: Path, small: Problem, policy: Policy) -> None:
    chosen = allocate(small, policy, parse_budget("1/2"))
    assert chosen.ceiling.params == 2 * 10 + 4 * 10 + 3 * 7
    assert chosen.spent + chosen.slack == chosen.ceiling.params
    path = tmp_path / "allocation.json"
    save_allocation(allocation_file("mine", small, chosen), path)
    read = load_allocation(path)
    assert read == allocation_file("mine", small, chosen)
    assert (read.fleet, read.policy, read.budget.kind, read.budget.value) == (
        "mine",
        policy,
        "fraction",
        "1/2",
    )
    assert [read.ranks[adapter][module] for adapter, module in small.names] == chosen.k.tolist()
    assert read.retained_energy == pytest.approx(small.energy(chosen.k) / np.square(small.sigma).sum())
    assert json.loads(path.read_text())["schema"] == "loraforge.allocation/1"


def test_policies_in_order_of_freedom(small: Problem) -> None:
    budget = parse_budget("1/2")
    chosen = {
        policy: allocate(small, policy, budget) for policy in ("uniform", "spectral", "spectral-nofloor")
    }
    assert chosen["uniform"].k.tolist() == uniform(small.rank, Fraction(1, 2)).tolist()
    assert (chosen["spectral"].k >= [1, 2, 2]).all()
    # the gap of the uniform policy reaches at least what the spectral one makes of the same budget
    energy = {policy: small.energy(found.k) for policy, found in chosen.items()}
    assert energy["uniform"] < energy["spectral"]
    assert energy["uniform"] + chosen["uniform"].gap >= energy["spectral"]


def test_k_max_caps_spectral_ranks(small: Problem) -> None:
    assert allocate(small, "spectral", parse_budget("1/2"), options=Options(k_max=2)).k.max() == 2
    with pytest.raises(BudgetError, match="--k-max: 0 is not a rank"):
        allocate(small, "spectral", parse_budget("1/2"), options=Options(k_max=0))


def test_parameters_as_ceiling(small: Problem) -> None:
    chosen = allocate(small, "spectral", parse_budget(params=70))
    assert chosen.ceiling.params == 70
    # ranks 1, 3, 2 cost 54; at the next step, 1/2, ranks 2, 4, 3 cost 81
    assert chosen.ceiling.fraction == Fraction(3, 8)
    assert chosen.spent <= 70
    assert chosen.slack < 10


def test_records_are_valid_evidence(small: Problem) -> None:
    from loraforge.evidence.targets.allocation import AllocationTarget

    chosen = allocate(small, "spectral", parse_budget("1/2"))
    raw = allocation_records(small, chosen)
    records = [AllocationTarget.record.validate_python(record) for record in raw]
    target = AllocationTarget()
    target.check(records, "records.jsonl")
    assert all(claim.passed for claim in target.claims(records))
    energies: list[Any] = [record["energy"] for record in raw[:-1]]
    assert sum(energies) == pytest.approx(small.energy(chosen.k))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spent": 1}, "not an allocation file (Value error, spent 1 and slack"),
        ({"policy": "best"}, "policy: not an allocation file (Input should be 'uniform', 'spectral', "),
        (
            {"ranks": {"x": {"q": -1}}},
            "ranks.x.q: not an allocation file (Input should be greater than or equal to 0",
        ),
    ],
)
def test_malformed_file(tmp_path: Path, small: Problem, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "allocation.json"
    save_allocation(allocation_file("mine", small, allocate(small, "uniform", parse_budget("1/2"))), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError) as caught:
        load_allocation(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert str(caught.value).endswith("; make it with `loraforge allocate`")


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["allocate", *map(str, arguments)])
    return int(caught.value.code or 0)


def test_command_line(tmp_path: Path, make_adapter: MakeAdapter, capsys: pytest.CaptureFixture[str]) -> None:
    for index, rank in enumerate((4, 8)):
        make_adapter(tmp_path / "fleet" / f"a{index}", r=rank, seed=index, use_rslora=bool(index))
    out, records = tmp_path / "allocation.json", tmp_path / "records.jsonl"
    common = (tmp_path / "fleet", "--cache", tmp_path / "cache", "-o", out)
    assert run(*common, "--budget", "1/4", "--records", records) == 0
    read = load_allocation(out)
    check_spectra(read, tmp_path)
    assert len(records.read_text().splitlines()) == 8 + 1
    assert "2/2" in capsys.readouterr().err
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.safetensors")}
    assert run(*common, "--bytes", 4 * read.spent, "--dtype", "float32", "--policy", "uniform") == 0
    assert "2/2" not in capsys.readouterr().err
    assert made
    assert {path: path.stat().st_mtime_ns for path in made} == made
    assert load_allocation(out).budget.params == read.spent


def check_spectra(read: AllocationFile, folder: Path) -> None:
    """The stated energy is that of dense singular values of the updates themselves."""
    kept = total = 0.0
    for name, ranks in read.ranks.items():
        adapter = open_adapter(folder / "fleet" / name)
        for module in adapter.modules:
            a, b = adapter.factors(module)
            squares = np.linalg.svd(module.scale * (b.double() @ a.double()).numpy(), compute_uv=False) ** 2
            kept += squares[: ranks[module.name]].sum()
            total += squares.sum()
    assert read.retained_energy == pytest.approx(kept / total, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--budget", "0"], 6, "error: --budget: 0 is not above 0 and at most 1; "),
        (["--budget", "1.5"], 6, "error: --budget: 1.5 is not above 0 and at most 1; "),
        (
            ["--params", "300"],
            6,
            "error: --params: 300 params is below the rank floor: rank 1 in all 4 modules takes ",
        ),
        ([], 2, "error: one budget is needed; pass one of --budget, --params and --bytes"),
        (
            ["--budget", "1/2", "--policy", "greedy"],
            2,
            "error: --policy: unknown policy 'greedy'; choose from uniform",
        ),
    ],
)
def test_command_line_refuses(
    tmp_path: Path,
    make_adapter: MakeAdapter,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    folder, out = (
        make_adapter(tmp_path / "a", layers=(0, 1), targets=("gate_proj", "up_proj")),
        tmp_path / "out.json",
    )
    assert run(folder, "--cache", tmp_path / "cache", "-o", out, *arguments) == code
    assert capsys.readouterr().err.splitlines()[-1].startswith(message)
    assert not out.exists()
