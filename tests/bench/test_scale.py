"""The benchmark of fleets by size, for real on small shapes: processes, a kill, and records that are evidence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from loraforge.bench.scale import benchmark
from loraforge.cli import main
from loraforge.errors import OutputError
from loraforge.evidence.targets import TARGETS
from loraforge.figures import table_of
from loraforge.fleet.shapes import ShapeFleet, repeated_fleet


def small(adapters: int) -> ShapeFleet:
    """Adapters of rank 2 on the first layer's attention."""
    whole = repeated_fleet("qwen50", adapters, 2)
    first = [i for i, (_, name) in enumerate(whole.names) if name.startswith("model.layers.0.self_attn")]
    return whole.select(np.array(first))


def test_repeated_fleet_has_every_module_of_every_layer() -> None:
    fleet = repeated_fleet("qwen50", 3, 2)
    assert fleet.name == "qwen3-4b-3"
    assert len(fleet.names) == len(set(fleet.names)) == 3 * 252
    assert fleet.n_parameters == 3 * 2 * 36 * 57_344
    assert small(2).n_parameters == 2 * 2 * (2 * (2560 + 4096) + 2 * (2560 + 1024))


@pytest.mark.slow
def test_a_change_of_the_fleet_costs_what_it_should_and_a_killed_run_goes_on(tmp_path: Path) -> None:
    records = benchmark([3], 2, tmp_path / "work", workers=1, shapes=small(4))
    target = TARGETS["scale"]
    parsed = target.parse([json.dumps(record) for record in records], "records")
    target.check(parsed, "records")
    assert [claim.claim for claim in target.claims(parsed) if not claim.passed] == []
    steps = {record["step"]: record for record in records[1:]}
    counted = {name: (step["read"], step["factorised"]) for name, step in steps.items() if name != "resume"}
    assert counted == {
        "factor": (3, 3),
        "allocate": (0, 0),
        "rebudget": (0, 0),
        "add": (1, 1),
        "remove": (0, 0),
    }
    assert steps["resume"]["lost"] == 2
    assert steps["resume"]["factorised"] == 2 - steps["resume"]["done_when_killed"]
    assert steps["rebudget"]["spent"] < steps["allocate"]["spent"] <= steps["allocate"]["ceiling"]
    assert len(table_of("scale", parsed)) == 7
    assert list(tmp_path.iterdir()) == []  # adapters and caches are gone


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="GiB are free"):
        benchmark([10**6], 2, tmp_path / "work", shapes=huge())
    assert list(tmp_path.iterdir()) == []


def huge() -> ShapeFleet:
    """One module that stands for a million adapters of a terabyte together."""
    ones = np.full(1, 1, dtype=np.int64)
    return ShapeFleet("huge", "base", (("a", "m"),), ones, ones * 10**15, ones * 10**15)


@pytest.mark.parametrize("sizes", ["", "1", "10,x", "10,,20", "-3", "1000000"])
def test_sizes_that_are_none_are_refused(
    sizes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "scale", "--adapters", sizes, "-o", str(tmp_path / "records.jsonl")])
    assert ended.value.code == 2
    assert "are not numbers of 2 to 100,000 adapters" in capsys.readouterr().err
