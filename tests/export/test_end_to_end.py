"""The end-to-end benchmark over emulated kernels: its fleet, its records and its command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from loraforge.allocate.budget import parse_budget
from loraforge.bench.end_to_end import benchmark
from loraforge.cli import main
from loraforge.evidence.targets import TARGETS
from loraforge.factor.gpu.ops import Emulated
from loraforge.factor.gpu.synthetic import write_fleet
from loraforge.fleet.peft_io import open_fleet
from loraforge.fleet.shapes import ShapeFleet

CPU = torch.device("cpu")


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraforge.factor.gpu.available", lambda: True)
    monkeypatch.setattr("loraforge.factor.gpu.kernels", Emulated)


@pytest.mark.usefixtures("on_gpu")
def test_a_written_shape_fleet_is_a_fleet_and_its_records_are_those_of_the_target(tmp_path: Path) -> None:
    rows = [(8, 48, 64), (8, 64, 48)] * 2 + [(4, 48, 64)]
    rank, d_in, d_out = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    tails = ("self_attn.q_proj", "mlp.up_proj")
    names = tuple((f"{i // 2:02d}", f"model.layers.0.{tails[i % 2]}") for i in range(len(rows)))
    shapes = ShapeFleet("mini", "none", names, rank, d_in, d_out)
    paths = write_fleet(shapes, tmp_path / "mini", CPU, 5, writers=2)
    fleet = open_fleet([tmp_path / "mini"])
    assert [adapter.path for adapter in fleet] == paths
    assert {
        (adapter.name, m.name, m.rank, m.d_in, m.d_out, m.scale, m.dtype)
        for adapter in fleet
        for m in adapter.modules
    } == {(*name, *row, 1.0, torch.bfloat16) for name, row in zip(names, rows, strict=True)}
    first, second = (adapter.factors(adapter.modules[0])[0] for adapter in fleet[:2])
    assert not torch.equal(first, second)

    records = benchmark(
        "mini", [tmp_path / "mini"], parse_budget("1/4"), tmp_path / "out", Emulated(), passes=2
    )
    target = TARGETS["end_to_end_compression"]
    parsed = [target.record.validate_python(record) for record in records]
    target.check(parsed, "records.jsonl")
    assert all(claim.passed for claim in target.claims(parsed))
    summary = target.summarise(parsed, "other")
    assert summary["mini.matrices"] == 5
    for owner in ("mini", "mini.cached"):
        assert summary[f"{owner}.passes"] == 2
        assert summary[f"{owner}.bytes_in"] == sum(a.weights_path.stat().st_size for a in fleet)
        assert summary[f"{owner}.bytes_out"] == sum(
            path.stat().st_size for path in (tmp_path / "out/ragged").glob("*/adapter_model.safetensors")
        )
        for stage in ("load", "hash", "factor", "allocate", "export"):
            assert 0 <= float(summary[f"{owner}.{stage}_s"]) < float(summary[f"{owner}.end_to_end_s"])
    assert (tmp_path / "out/manifest.json").exists()
    assert not (tmp_path / "out.cache").exists()


@pytest.mark.usefixtures("on_gpu")
def test_the_command_fills_a_folder_times_it_and_removes_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "loraforge.bench.fleets.shape_fleet",
        lambda name: ShapeFleet(
            name, "none", (("00", "layers.0.q_proj"), ("01", "layers.0.q_proj")),
            *(np.array(column, dtype=np.int64) for column in ((4, 8), (40, 40), (32, 32))),
        ),
    )  # fmt: skip
    records = tmp_path / "records.jsonl"
    spectra = tmp_path / "spectra.jsonl"
    spectra.write_text('{"sigma": [2.0, 1.0, 0.5]}\n')
    with pytest.raises(SystemExit) as stopped:
        main(
            ["bench", "end-to-end", str(tmp_path / "tiny"), "--shapes", "tiny", "-o", str(records), "--passes", "2",
             "--budget", "1/2", "--spectra", str(spectra)]
        )  # fmt: skip
    assert stopped.value.code == 0
    target = TARGETS["end_to_end_compression"]
    assert target.summarise(target.read(records), "other")["tiny.passes"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["records.jsonl", "spectra.jsonl", "tiny"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
@pytest.mark.parametrize(
    "command", [("end-to-end", "x"), ("recompression", "--shapes", "qwen50", "--devices", "2")]
)
def test_both_need_a_gpu(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *command])
    assert stopped.value.code == 7
    assert "run loraforge doctor" in capsys.readouterr().err
