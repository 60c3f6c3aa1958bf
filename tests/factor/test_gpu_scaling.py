"""A shape fleet divided between two processes with emulated kernels: shares, records, failures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loraforge.errors import LoraForgeError, UsageError
from loraforge.evidence.targets import TARGETS
from loraforge.factor.gpu.scaling import benchmark_scaling, shares
from loraforge.fleet.shapes import ShapeFleet, shape_fleet


def shapes(adapters: int = 3) -> ShapeFleet:
    rows = [(4, 24, 40), (4, 40, 24), (8, 24, 40), (8, 30, 30)] * adapters
    rank, d_in, d_out = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    names = tuple((f"adapter{i // 4}", f"module{i % 4}") for i in range(len(rows)))
    return ShapeFleet("mini", "none", names, rank, d_in, d_out)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_shares_keep_adapters_whole_and_are_balanced(count: int) -> None:
    fleet = shape_fleet("qwen50")
    seconds = {16: 1e-6, 32: 2e-6, 64: 5e-6, 128: 3e-5}
    parts = shares(fleet, count, seconds)
    owners = [{adapter for adapter, _ in part.names} for part in parts]
    assert sum(len(part.names) for part in parts) == len(fleet.names)
    assert sorted(name for owned in owners for name in owned) == sorted({a for a, _ in fleet.names})
    assert {name for part in parts for name in part.names} == set(fleet.names)
    cost = [sum(seconds[rank] for rank in part.rank.tolist()) for part in parts]
    assert max(cost) <= 1.05 * sum(cost) / count
    where = dict(zip(fleet.names, zip(fleet.rank, fleet.d_in, fleet.d_out, strict=True), strict=True))
    for part in parts:
        assert all(
            where[name] == row
            for name, *row_ in zip(part.names, part.rank, part.d_in, part.d_out, strict=True)
            for row in [tuple(row_)]
        )


def test_two_processes_time_one_pass_together() -> None:
    records = benchmark_scaling(shapes(), ["cpu", "cpu"], [2], warmups=1, passes=3)
    target = TARGETS["recompression"]
    parsed = [target.record.validate_python(record) for record in records]
    target.check(parsed, Path("records.jsonl"))
    assert all(claim.passed for claim in target.claims(parsed))
    summary = target.summarise(parsed, "other")
    assert summary["mini.matrices"] == 12
    assert summary["mini.gram_x1.passes"] == summary["mini.gram_x2.passes"] == 3
    assert summary["scaling.x2"] == pytest.approx(
        float(summary["mini.gram_x1_s"]) / float(summary["mini.gram_x2_s"])
    )
    assert "scaling.x1" not in summary
    stages = {stage for record in records if "pass" in record for stage in record["stages"]}
    assert stages == {"gram", "core", "evd", "apply"}


def test_a_process_that_fails_ends_the_run_with_its_reason() -> None:
    fleet = shapes(2)
    fleet.d_out[-1] = 4  # of rank 8: no factorisation takes it
    with pytest.raises(LoraForgeError, match="Error: "):
        benchmark_scaling(fleet, ["cpu", "cpu"], [2], warmups=0, passes=1)


def test_more_devices_than_there_are_and_than_adapters() -> None:
    with pytest.raises(UsageError, match="4 devices asked for, 1 found"):
        benchmark_scaling(shapes(), ["cpu"], [4])
    with pytest.raises(UsageError, match="3 adapters cannot be divided between 4"):
        shares(shapes(), 4, {4: 1.0, 8: 1.0})
