"""The device benchmark on a fleet of three shapes, over emulated kernels: what it times, checks and states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loraforge.cli import main
from loraforge.errors import LoraForgeError, UsageError
from loraforge.evidence.targets import TARGETS
from loraforge.factor.batch import Batch
from loraforge.factor.gpu import baselines, floors
from loraforge.factor.gpu.check import root_spectrum
from loraforge.factor.gpu.engine import allocate, factorise_groups
from loraforge.factor.gpu.ops import Emulated
from loraforge.factor.gpu.recompression import METHODS, benchmark_device
from loraforge.factor.gpu.synthetic import DeviceFleet, device_fleet, reordered, sample
from loraforge.fleet.shapes import ShapeFleet

CPU = torch.device("cpu")


def shapes() -> ShapeFleet:
    rows = [(4, 24, 40), (4, 40, 24), (8, 24, 40)] * 4 + [(4, 24, 40)]
    rank, d_in, d_out = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    names = tuple((f"adapter{i % 2}", f"module{i}") for i in range(len(rows)))
    return ShapeFleet("mini", "none", names, rank, d_in, d_out)


def fleet() -> DeviceFleet:
    return device_fleet(shapes(), CPU, 5)


def ranks(sigma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert sigma.shape == (int(shapes().rank.sum()),)
    return torch.arange(13) % 4 + 1, torch.full((13,), 2)


def test_the_fleet_has_its_shapes_and_spectra_near_those_drawn() -> None:
    made = fleet()
    wide = device_fleet(
        ShapeFleet("w", "none", (("a", "m"),), np.array([4]), np.array([4000]), np.array([3000])), CPU, 5,
        [np.array([4.0, 2.0, 1.0, 0.5])],
    )  # fmt: skip
    given = wide.groups[0]
    s = root_spectrum(Batch.of(given.a, given.b, given.scale), Emulated())[0]
    assert torch.allclose(s / s[0], torch.tensor([1.0, 0.5, 0.25, 0.125]).double(), rtol=0.15)
    assert sorted(index for members in made.members for index in members.tolist()) == list(range(13))
    for group, members in zip(made.groups, made.members, strict=True):
        for index in members.tolist():
            assert group.key == (shapes().d_in[index], shapes().d_out[index], shapes().rank[index])


def test_reordering_and_sampling_keep_modules_with_their_weights() -> None:
    before, made = fleet(), fleet()
    keep = [ranks(torch.empty(int(shapes().rank.sum())))[0][members] for members in made.members]
    after, kept = reordered(made, keep)
    for old, new, old_ids, new_ids, k in zip(
        before.groups, after.groups, before.members, after.members, kept, strict=True
    ):
        assert k.tolist() == sorted(k.tolist())
        for row, index in enumerate(new_ids.tolist()):
            assert torch.equal(new.a[row], old.a[old_ids.tolist().index(index)])
    part = sample(after, 6)
    assert 6 <= part.n < 13
    assert all(len(group) for group in part.groups)


def test_records_are_those_of_the_target() -> None:
    records = benchmark_device(fleet(), Emulated(), ranks, methods=METHODS, warmups=0, passes=3, subset=6)
    target = TARGETS["recompression"]
    parsed = [target.record.validate_python(record) for record in records]
    target.check(parsed, Path("records.jsonl"))
    assert all(claim.passed for claim in target.claims(parsed))
    summary = target.summarise(parsed, "other")
    assert summary["mini.matrices"] == 13
    for method in METHODS:
        sampled = method in ("florist", "spectral_transform")
        assert (f"mini.{method}_s" in summary) != sampled
        assert (f"mini.{method}.extrapolated_s" in summary) == sampled
    assert 6 <= int(summary["mini.florist.sample_matrices"]) < 13
    assert {record["fleet"] for record in records} == {"mini"}
    stages = next(r["stages"] for r in records if r["method"] == "gram" and "pass" in r)
    assert set(stages) == {"gram", "core", "evd", "apply"}


def test_within_a_budget_of_seconds_every_pass_is_done() -> None:
    records = benchmark_device(fleet(), Emulated(), ranks, methods=METHODS, warmups=2, passes=3, budget=1e6)
    summary = summary_of(records)
    for method in METHODS:
        assert (summary[f"mini.{method}.passes"], summary[f"mini.{method}.warmups"]) == (3, 2)
        assert summary[f"mini.{method}.warmup_matrices"] == 13


def test_beyond_a_budget_the_whole_fleet_is_timed_once() -> None:
    records = benchmark_device(fleet(), Emulated(), ranks, methods=METHODS, warmups=2, passes=3, budget=0.0)
    summary = summary_of(records)
    assert not [record for record in records if "pass" in record and "n" in record]
    for method in METHODS:
        assert summary[f"mini.{method}_s"]
        assert summary[f"mini.{method}.passes"] == 1
        # a method that goes pair by pair warms up on a sample, which here is the whole fleet; others on themselves
        assert summary[f"mini.{method}.warmups"] == (0 if method in baselines.PAIRWISE else 1)
        assert summary[f"mini.{method}.warmup_matrices"] == 13
    stated = [record for record in records if record.get("record") == "protocol"]
    assert all(record["budget_s"] == 0 and record["estimate_s"] > 0 for record in stated)


def test_without_warm_ups_a_long_method_still_has_one_pass() -> None:
    records = benchmark_device(fleet(), Emulated(), ranks, methods=["fraq"], warmups=0, passes=3, budget=0.0)
    assert [record["pass"] for record in records if "pass" in record] == [0]


def summary_of(records: list[dict[str, Any]]) -> dict[str, Any]:
    target = TARGETS["recompression"]
    parsed = [target.record.validate_python(record) for record in records]
    target.check(parsed, Path("records.jsonl"))
    return target.summarise(parsed, "other")


def test_floors_by_hand() -> None:
    """One matrix of 24 x 40 and rank 4, of which X is the side of 24 rows; 2 directions are written."""
    made = device_fleet(shapes().select(np.array([0])), CPU, 5)
    found = floors.amounts("gram", made.groups, allocate(made.groups, [torch.tensor([2])]))
    assert found == {
        ("gram", "bytes"): 4 * 4 * 64, ("gram", "flops"): 4 * 5 * 64,
        ("core", "bytes"): 48 * 16, ("core", "flops"): pytest.approx(10 / 3 * 64),
        ("evd", "bytes"): 16 * 16, ("evd", "flops"): pytest.approx(10 / 3 * 64),
        ("apply", "bytes"): 4 * 6 * 64, ("apply", "flops"): 2 * 4 * 2 * 64,
    }  # fmt: skip
    tsqr = floors.amounts("tsqr", made.groups, allocate(made.groups))
    assert tsqr["qr", "bytes"] == 8 * 4 * 24
    assert tsqr["qr", "flops32"] == pytest.approx(2 * 16 * 24 - 2 / 3 * 64)
    assert tsqr["gram", "bytes"] == 4 * 4 * 40
    assert tsqr["gram", "flops"] == 4 * 5 * 40
    assert (tsqr["apply", "flops"], tsqr["apply", "flops32"]) == (2 * 4 * 4 * 40, 2 * 4 * 4 * 24)
    slow = floors.records(tsqr, {"bytes": 1e9, "flops": 1e9, "flops32": 1.0})
    errors = {"record": "check", "max_action_error": 0.0, "max_spectrum_error": 0.0, "n": 1}
    timed = {"pass": 0, "seconds": 9e4, "stages": {"qr": 8e4, "evd": 1.0}}
    protocol = {"record": "protocol", "warmups": 0, "warmup_matrices": 0, "passes": 1, "estimate_s": 1.0}
    named = [{"fleet": "mini", "method": "tsqr"} | one for one in (timed, errors, protocol, *slow)]
    summary = summary_of(named)
    assert summary["mini.tsqr.qr.bound"] == "flops32"
    assert summary["mini.tsqr.qr.floor_s"] == pytest.approx(2 * 16 * 24 - 2 / 3 * 64)
    assert summary["mini.tsqr.qr.times_floor"] == pytest.approx(8e4 / summary["mini.tsqr.qr.floor_s"])
    assert summary["mini.tsqr.evd.bound"] == "bytes"


def test_a_method_that_is_wrong_has_no_time() -> None:
    class Wrong(Emulated):
        def apply(self, x: Any, layout: int, t: Any, out: Any) -> None:
            super().apply(x, layout, t, out)
            out *= 1.001

    with pytest.raises(LoraForgeError, match="gram: fails acceptance on mini"):
        benchmark_device(fleet(), Wrong(), ranks, methods=["gram"], warmups=0, passes=1)


def test_an_unknown_method() -> None:
    with pytest.raises(UsageError, match="choose from gram"):
        benchmark_device(fleet(), Emulated(), ranks, methods=["qr"])


@pytest.mark.parametrize("method", baselines.METHODS)
def test_baselines_are_the_same_mathematics(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recompress, batch = baselines.METHODS[method]
    monkeypatch.setitem(baselines.METHODS, method, (recompress, min(batch, 3)))  # several batches a group
    made = fleet()
    made.groups[0].b[1, :, 2:] = made.groups[0].b[1, :, :2]  # of rank two
    out = allocate(made.groups)
    baselines.run(method, made.groups, out, Emulated())
    ours = factorise_groups(made.groups, Emulated())
    for one, other in zip(out, ours, strict=True):
        assert torch.allclose(one.s, other.s, rtol=1e-5, atol=1e-6)
        for k in (1, 4):
            updates = [part.b[:, :, :k] @ part.a[:, :k] for part in (one.parts[0], other.parts[0])]
            assert torch.allclose(*updates, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_shape_fleets_need_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "recompression", "--shapes", "qwen50", "-o", str(tmp_path / "r.jsonl")])
    assert stopped.value.code == 7
    assert "run loraforge doctor" in capsys.readouterr().err
