"""The chain on one device, over emulated kernels: the ranks and updates of ``loraforge compress``, and its records."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_folders import MakeAdapter
from safetensors.torch import load_file

from loraforge.allocate.budget import parse_budget
from loraforge.cli import main
from loraforge.compress import compress
from loraforge.end_to_end import benchmark, compress_on_device
from loraforge.errors import InputError, LoraForgeError
from loraforge.evidence.targets import TARGETS
from loraforge.factor.gpu import loader
from loraforge.factor.gpu.loader import load_fleet
from loraforge.factor.gpu.ops import Emulated
from loraforge.factor.gpu.synthetic import write_fleet
from loraforge.fleet.peft_io import open_adapter, open_fleet
from loraforge.fleet.shapes import ShapeFleet

CPU = torch.device("cpu")
TARGET_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, make_adapter: MakeAdapter) -> Path:
    """Three adapters that differ in rank, type, scale and modules; one keeps a whole tensor."""
    root = tmp_path_factory.mktemp("fleet")
    make_adapter(root / "a", r=8, targets=TARGET_MODULES, dtype=torch.bfloat16)
    make_adapter(root / "b", r=4, lora_alpha=-6, seed=1, use_rslora=True)
    make_adapter(
        root / "c", r=8, seed=2, dtype=torch.float16, rank_pattern={"v_proj": 6}, modules_to_save=["lm_head"],
        extra={"base_model.model.lm_head.weight": torch.arange(12.0).reshape(3, 4)},
    )  # fmt: skip
    return root


@pytest.mark.parametrize("budget", ["1/4", "1"])
def test_ranks_and_updates_are_those_of_compress(folders: Path, tmp_path: Path, budget: str) -> None:
    wanted = parse_budget(budget)
    result = compress([folders], wanted, tmp_path / "cpu", cache=tmp_path / "cache", layouts=["ragged"])
    outcome = compress_on_device([folders], wanted, tmp_path / "device", Emulated())
    entries = result.manifest.adapters
    assert outcome.ranks == {
        name: {module: m.k for module, m in entry.modules.items()} for name, entry in entries.items()
    }
    certified = max(m.certificate.action_error for e in entries.values() for m in e.modules.values())
    assert outcome.max_action_error == pytest.approx(certified, rel=0.05)
    assert set(outcome.seconds) == {"load", "factor", "allocate", "export"}
    written = 0
    for name in ("a", "b", "c"):
        ours, theirs = (open_adapter(tmp_path / side / "ragged" / name) for side in ("device", "cpu"))
        assert ours.config == theirs.config
        assert ours.modules == theirs.modules
        assert ours.passthrough == theirs.passthrough
        written += ours.weights_path.stat().st_size
        mine, other = load_file(ours.weights_path), load_file(theirs.weights_path)
        assert mine.keys() == other.keys()
        for key in ours.passthrough:
            assert torch.equal(mine[key], other[key])
        for module in ours.modules:
            updates = [t[module.b_key].double() @ t[module.a_key].double() for t in (mine, other)]
            assert torch.linalg.norm(updates[0] - updates[1]) <= 0.01 * torch.linalg.norm(updates[1])
    assert outcome.bytes_out == written


def test_loading_in_small_chunks_gives_every_module_its_tensors(folders: Path) -> None:
    fleet = open_fleet([folders])
    loaded = load_fleet(fleet, CPU, readers=3, chunk_bytes=1000)
    modules = [(adapter, module) for adapter in fleet for module in adapter.modules]
    seen = []
    for group, members in zip(loaded.groups, loaded.members, strict=True):
        for row, index in enumerate(members.tolist()):
            adapter, module = modules[index]
            a, b = adapter.factors(module)
            assert torch.equal(group.a[row], a)
            assert torch.equal(group.b[row], b)
            assert group.a.dtype == a.dtype
            assert float(group.scale[row]) == module.scale
            assert (group.names or ())[row] == f"{adapter.name}: {module.name}"
            seen.append(index)
    assert sorted(seen) == list(range(len(modules)))


def test_nan_is_named_and_nothing_is_written(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    make_adapter(tmp_path / "in/good")
    path = make_adapter(tmp_path / "in/bad", seed=3)
    tensors = load_file(path / "adapter_model.safetensors")
    key = next(key for key in tensors if "layers.1" in key and "v_proj" in key)
    tensors[key][0, 0] = float("nan")
    from safetensors.torch import save_file

    save_file(tensors, path / "adapter_model.safetensors")
    with pytest.raises(InputError, match=r"bad: model\.layers\.1\.self_attn\.v_proj.*NaN"):
        compress_on_device([tmp_path / "in"], parse_budget("1/2"), tmp_path / "out", Emulated())
    assert not (tmp_path / "out").exists()


def test_fp64_factors_and_unvouched_matrices_are_sent_to_compress(
    tmp_path: Path, make_adapter: MakeAdapter, folders: Path
) -> None:
    make_adapter(tmp_path / "wide", dtype=torch.float64)
    with pytest.raises(InputError, match="use loraforge compress, which factorises FP64"):
        compress_on_device([tmp_path / "wide"], parse_budget("1/2"), tmp_path / "out", Emulated())

    class Blind(Emulated):
        def eigh(self, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            w, v = super().eigh(g)
            return w * torch.nan, v

    with pytest.raises(LoraForgeError, match="no GPU path vouches"):
        compress_on_device([folders], parse_budget("1/2"), tmp_path / "out", Blind())


def test_a_file_cut_short_while_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"1234")
    with pytest.raises(InputError, match="was truncated"):
        loader._read_into(tmp_path / "w", 2, torch.empty(8, dtype=torch.uint8))


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
    assert summary["mini.passes"] == 2
    assert summary["mini.bytes_in"] == 2 * shapes.n_parameters
    assert (tmp_path / "out/ragged/02/adapter_config.json").exists()


def test_the_command_fills_a_folder_times_it_and_removes_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraforge.factor.gpu.available", lambda: True)
    monkeypatch.setattr("loraforge.factor.gpu.kernels", Emulated)
    monkeypatch.setattr(
        "loraforge.fleet.shapes.shape_fleet",
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
