"""Engine, cache and command line on real adapter folders."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from loraforge.cli import main
from loraforge.errors import InputError, LoraForgeError, UsageError
from loraforge.factor import fleet as factor_fleet
from loraforge.factor.cache import cache_path, find
from loraforge.factor.engine import factorise_adapter, group_by_shape
from loraforge.factor.fleet import factorise_fleet
from loraforge.factor.pool import worker_pool
from loraforge.factor.recompression import benchmark
from loraforge.factor.reference import dense_svd
from loraforge.factor.spectra import spectra_records
from loraforge.factor.stages import Stages
from loraforge.files import read_jsonl
from loraforge.fleet.peft_io import Adapter, open_adapter, open_fleet

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture
def fleet(tmp_path: Path, make_adapter: Any) -> list[Adapter]:
    """Three adapters of different ranks, scales and types."""
    make_adapter(tmp_path / "fleet" / "one", r=4, targets=ALL, dtype=torch.bfloat16, seed=1)
    make_adapter(tmp_path / "fleet" / "two", r=8, use_rslora=True, seed=2, rank_pattern={"q_proj": 3})
    make_adapter(tmp_path / "fleet" / "zero", r=4, zero_b=True, seed=3)
    return open_fleet([tmp_path / "fleet"])


def edit_weights(folder: Path, key_part: str, change: Any) -> str:
    """Change the tensors whose key holds ``key_part``; returns the last key changed."""
    tensors = load_file(folder / "adapter_model.safetensors")
    keys = [key for key in tensors if key_part in key]
    for key in keys:
        tensors[key] = change(tensors[key]).contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    return keys[-1]


def test_cached_factors_are_the_ordered_factors_of_the_update(fleet: list[Adapter], tmp_path: Path) -> None:
    cached = factorise_fleet(fleet, tmp_path / "cache")
    for adapter, entry in zip(fleet, cached, strict=True):
        assert entry.adapter == adapter.name
        assert list(entry.modules) == [module.name for module in adapter.modules]
        for module in adapter.modules:
            a, b = adapter.factors(module)
            u, s, vh = dense_svd(a, b, module.scale)
            spectrum = entry.spectrum(module.name)
            assert spectrum.dtype == np.float64
            assert np.allclose(spectrum, s[: module.rank].numpy(), rtol=0, atol=1e-6 * (float(s[0]) or 1))
            k = module.rank // 2
            left_a, left_b = entry.factors(module.name, k)
            assert left_a.shape == (k, module.d_in)
            assert left_b.shape == (module.d_out, k)
            best = (u[:, :k] * s[:k]) @ vh[:k]
            assert torch.allclose(left_b.double() @ left_a.double(), best, atol=3e-6 * (float(s[0]) or 1))
            record = entry.modules[module.name]
            assert (record.rank, record.d_in, record.d_out) == (module.rank, module.d_in, module.d_out)
            assert record.scale == module.scale
            assert record.path == ("tsqr" if adapter.name == "zero" else "gram")
            assert record.action_error < 2e-6
            assert record.spectrum_error < 1e-6


@pytest.mark.parametrize("method", ["gram", "tsqr", "reference"])
def test_one_path_for_all(fleet: list[Adapter], tmp_path: Path, method: Any) -> None:
    for entry in factorise_fleet(fleet[:2], tmp_path / "cache", method=method):
        assert {record.path for record in entry.modules.values()} == {method}


def test_gram_alone_refuses_what_it_cannot_do(fleet: list[Adapter], tmp_path: Path) -> None:
    with pytest.raises(
        LoraForgeError, match=r"adapter zero.*too ill-conditioned.*use the method auto"
    ) as caught:
        factorise_fleet(fleet, tmp_path / "cache", method="gram")
    assert caught.value.key == "model.layers.0.self_attn.q_proj"


def test_only_the_ill_conditioned_module_takes_the_fallback(tmp_path: Path, make_adapter: Any) -> None:
    folder = make_adapter(tmp_path / "mixed", r=4)
    edit_weights(folder, "layers.1.self_attn.q_proj.lora_B", lambda b: torch.cat([b[:, :3], b[:, :1]], dim=1))
    (entry,) = factorise_fleet([open_adapter(folder)], tmp_path / "cache")
    paths = {name: record.path for name, record in entry.modules.items()}
    assert paths.pop("model.layers.1.self_attn.q_proj") == "tsqr"
    assert set(paths.values()) == {"gram"}
    assert entry.spectrum("model.layers.1.self_attn.q_proj")[3] < 1e-6


def test_result_that_fits_no_path_names_adapter_and_module(tmp_path: Path, make_adapter: Any) -> None:
    """The effective singular values are near 1e90: no FP32 factor can hold their roots."""
    folder = make_adapter(tmp_path / "huge", r=2, dtype=torch.float64, layers=(0,))
    edit_weights(folder, "v_proj", lambda factor: factor * 1e45)
    with pytest.raises(LoraForgeError, match="adapter huge: no factorisation passes acceptance") as caught:
        factorise_fleet([open_adapter(folder)], tmp_path / "cache")
    assert caught.value.key == "model.layers.0.self_attn.v_proj"
    assert not list((tmp_path / "cache").rglob("*"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_named(tmp_path: Path, make_adapter: Any, value: float) -> None:
    folder = make_adapter(tmp_path / "bad")
    key = edit_weights(folder, "layers.1.self_attn.v_proj.lora_B", lambda b: torch.full_like(b, value))
    with pytest.raises(InputError, match="NaN or infinite") as caught:
        factorise_fleet([open_adapter(folder)], tmp_path / "cache")
    assert caught.value.key == key


def test_unknown_method_is_refused_before_any_work(fleet: list[Adapter], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="choose from auto, gram, tsqr, reference"):
        factorise_fleet(fleet, tmp_path / "cache", method="magic")  # type: ignore[arg-type]


def test_results_do_not_depend_on_workers_and_repeat_bitwise(fleet: list[Adapter], tmp_path: Path) -> None:
    files = []
    for number, workers in enumerate((1, 3, 3)):
        factorise_fleet(fleet, tmp_path / str(number), workers=workers)
        files.append(
            {p.name: p.read_bytes() for p in (tmp_path / str(number) / "factors").glob("*.safetensors")}
        )
    assert len(files[0]) == 3
    assert files[0] == files[1] == files[2]


def count_builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    built: list[str] = []
    real = factor_fleet.factorise_adapter

    def counted(adapter: Adapter, **options: Any) -> Any:
        built.append(adapter.name)
        return real(adapter, **options)

    monkeypatch.setattr(factor_fleet, "factorise_adapter", counted)
    return built


def test_second_run_builds_nothing(
    fleet: list[Adapter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = factorise_fleet(fleet, tmp_path / "cache")
    built = count_builds(monkeypatch)
    assert factorise_fleet(fleet, tmp_path / "cache") == first
    assert [find(adapter, cache_path(adapter, tmp_path / "cache")) for adapter in fleet] == first
    assert built == []
    factorise_fleet(fleet, tmp_path / "cache", method="tsqr")
    assert built == ["one", "two", "zero"]


def test_equal_adapters_share_an_entry_and_keep_their_names(tmp_path: Path, make_adapter: Any) -> None:
    for name in ("one", "two"):
        make_adapter(tmp_path / "twins" / name)
    found = factorise_fleet(open_fleet([tmp_path / "twins"]), tmp_path / "cache")
    assert [entry.adapter for entry in found] == ["one", "two"]
    assert found[0].path == found[1].path


def test_changed_weights_or_scale_are_another_entry(tmp_path: Path, make_adapter: Any) -> None:
    paths = {cache_path(open_adapter(make_adapter(tmp_path / "a", r=4)), tmp_path)}
    paths.add(cache_path(open_adapter(make_adapter(tmp_path / "a", r=4, lora_alpha=3)), tmp_path))
    paths.add(cache_path(open_adapter(make_adapter(tmp_path / "a", r=4, seed=1)), tmp_path))
    assert len(paths) == 3


@pytest.mark.parametrize("damage", ["truncate", "flip", "error", "path", "rename", "garbage", "empty"])
def test_damaged_entry_is_refused_and_rebuilt_alone(
    fleet: list[Adapter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    factorise_fleet(fleet, tmp_path / "cache")
    path = cache_path(fleet[1], tmp_path / "cache")
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-5] ^= 1
    broken = {
        "truncate": whole[:-100],
        "flip": bytes(flipped),
        "error": re.sub(rb'(action_error\\":)\d', rb"\g<1>0", whole, count=1),
        "path": whole.replace(b'path\\":\\"gram', b'path\\":\\"tsqr', 1),
        "rename": whole.replace(b"layers.0.self_attn.q_proj.S", b"layers.9.self_attn.q_proj.S", 1),
        "garbage": b"x" * 1000,
        "empty": b"",
    }
    assert broken[damage] != whole
    path.write_bytes(broken[damage])
    assert find(fleet[1], path) is None
    built = count_builds(monkeypatch)
    factorise_fleet(fleet, tmp_path / "cache")
    assert built == ["two"]
    assert path.read_bytes() == whole


def test_interrupted_run_resumes(
    fleet: list[Adapter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = factor_fleet.factorise_adapter

    def interrupted(adapter: Adapter, **options: Any) -> Any:
        if adapter.name == "two":
            raise KeyboardInterrupt
        return real(adapter, **options)

    monkeypatch.setattr(factor_fleet, "factorise_adapter", interrupted)
    with pytest.raises(KeyboardInterrupt):
        factorise_fleet(fleet, tmp_path / "cache")
    files = {path.suffix for path in (tmp_path / "cache" / "factors").iterdir()}
    assert files == {".safetensors", ".json"}
    monkeypatch.setattr(factor_fleet, "factorise_adapter", real)
    built = count_builds(monkeypatch)
    factorise_fleet(fleet, tmp_path / "cache")
    assert built == ["two", "zero"]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"seconds"'])
def test_a_damaged_timing_is_a_lost_one(fleet: list[Adapter], tmp_path: Path, text: str) -> None:
    (entry,) = factorise_fleet(fleet[:1], tmp_path / "cache")
    assert entry.timing is not None
    entry.path.with_suffix(".timing.json").write_text(text)
    assert entry.timing is None
    assert len(spectra_records([entry])) == len(entry.modules)  # and no timing record


def test_entry_vanishing_later_is_one_clear_error(fleet: list[Adapter], tmp_path: Path) -> None:
    (entry,) = factorise_fleet(fleet[:1], tmp_path / "cache")
    entry.path.unlink()
    with pytest.raises(InputError, match="run the factor stage again"):
        entry.factors(next(iter(entry.modules)))


def test_batches_hold_equal_shapes_and_every_key_once() -> None:
    modules = [(i, 4 + i % 2, 6, 2 + i % 3) for i in range(40)]
    batches = group_by_shape(modules, max_batch=3)
    assert sorted(key for batch in batches for key in batch) == list(range(40))
    assert all(len({modules[key][1:] for key in batch}) == 1 and len(batch) <= 3 for batch in batches)
    assert modules[batches[0][0]][3] == 4  # the costliest first


def test_pool_raises_the_first_error_and_restores_threads() -> None:
    before = torch.get_num_threads()
    started = threading.Event()

    def fail(item: int) -> int:
        started.set()
        raise ValueError(str(item))

    with worker_pool(2) as pool:
        assert torch.get_num_threads() == 1
        with pytest.raises(ValueError, match="0"):
            pool.map(fail, [0, 1, 2])
    assert started.is_set()
    assert torch.get_num_threads() == before


def test_stages_account_for_the_work(fleet: list[Adapter]) -> None:
    stages = Stages()
    with worker_pool(1) as pool:
        factorise_adapter(fleet[0], method="auto", pool=pool, stages=stages)
    assert set(stages.seconds) == {"load", "gram", "evd", "apply", "verify"}
    assert all(seconds > 0 for seconds in stages.seconds.values())


def test_factor_command_writes_spectra_and_the_time_of_the_build(
    fleet: list[Adapter], tmp_path: Path
) -> None:
    arguments = ["factor", str(tmp_path / "fleet"), "--cache", str(tmp_path / "cache"), "--records"]
    timings = []
    for name in ("first.jsonl", "second.jsonl"):
        with pytest.raises(SystemExit) as ended:
            main([*arguments, str(tmp_path / name)])
        assert ended.value.code == 0
        *spectra, timing = read_jsonl(tmp_path / name)
        timings.append(timing)
    assert timings[0] == timings[1]  # the second run found everything in the cache
    assert timing["record"] == "timing"
    assert timing["seconds"] == sum(timing["passes"]) > 0
    assert len(spectra) == sum(len(adapter.modules) for adapter in fleet)
    assert spectra[0]["module"] == "model.layers.0.mlp.down_proj"
    assert (spectra[0]["kind"], spectra[0]["layer"], spectra[0]["rank"]) == ("down_proj", 0, 4)
    assert len(spectra[0]["sigma"]) == 4
    assert spectra[0]["path"] == "gram"


def test_factor_command_refuses_an_unknown_method(
    fleet: list[Adapter], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["factor", str(tmp_path / "fleet"), "--method", "magic"])
    assert ended.value.code == 2
    assert "choose from auto, gram, tsqr, reference" in capsys.readouterr().err


def test_bench_command_times_and_checks_every_method(fleet: list[Adapter], tmp_path: Path) -> None:
    out = tmp_path / "records.jsonl"
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "bench",
                "recompression",
                str(tmp_path / "fleet"),
                "--warmups",
                "0",
                "--passes",
                "2",
                "-o",
                str(out),
                "--methods",
                "florist,spectral_transform,fraq,tsqr,gram",
                "--adapters",
                "one,zero",
            ]
        )
    assert ended.value.code == 0
    records = list(read_jsonl(out))
    checks = {record["method"]: record for record in records if record.get("record") == "check"}
    passes = [(record["method"], record["pass"]) for record in records if "pass" in record]
    assert sorted(passes) == sorted((method, number) for method in checks for number in (0, 1))
    assert set(checks) == {"florist", "spectral_transform", "fraq", "tsqr", "gram"}
    for check in checks.values():
        assert check["n"] == len(fleet[0].modules) + len(fleet[2].modules)
        assert check["max_action_error"] < 3e-6
        assert check["max_spectrum_error"] < 3e-6
    for record in records:
        if "pass" in record:
            assert 0 < sum(record["stages"].values()) <= record["seconds"]
    json.dumps(records, allow_nan=False)


def test_bench_refuses_what_does_not_exist(
    fleet: list[Adapter], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="unknown method 'magic'"):
        benchmark(fleet, methods=["gram", "magic"])
    with pytest.raises(SystemExit) as ended:
        main(["bench", "recompression", str(tmp_path / "fleet"), "-o", "x", "--adapters", "four"])
    assert ended.value.code == 2
    assert "choose from one, two, zero" in capsys.readouterr().err
