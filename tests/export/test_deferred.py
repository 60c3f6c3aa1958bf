"""``compress`` on a GPU without a cache, over emulated kernels: the ranks, updates and manifest of the CPU's chain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folders import SEVEN, MakeAdapter
from safetensors.torch import load_file, save_file

from loraforge.allocate.budget import parse_budget
from loraforge.compress import Compressed, compress
from loraforge.config import Layout
from loraforge.errors import InputError
from loraforge.export import deferred
from loraforge.export.directions import CachedFleet
from loraforge.export.manifest import load_adapter_manifest, load_manifest
from loraforge.factor import gpu
from loraforge.factor.cache import CachedAdapter
from loraforge.factor.gpu import shards
from loraforge.factor.gpu.ops import Emulated
from loraforge.files import sha256_file
from loraforge.fleet.peft_io import open_adapter


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, make_adapter: MakeAdapter) -> Path:
    """Adapters that differ in rank, type, scale and modules; one keeps a whole tensor, one is stored as FP64."""
    root = tmp_path_factory.mktemp("fleet")
    make_adapter(root / "a", r=8, targets=SEVEN, dtype=torch.bfloat16)
    make_adapter(root / "b", r=4, lora_alpha=-6, seed=1, use_rslora=True)
    make_adapter(
        root / "c", r=8, seed=2, dtype=torch.float16, rank_pattern={"v_proj": 6}, modules_to_save=["lm_head"],
        extra={"base_model.model.lm_head.weight": torch.arange(12.0).reshape(3, 4)},
    )  # fmt: skip
    make_adapter(root / "d", r=1, seed=3)
    make_adapter(root / "e", r=4, seed=4, dtype=torch.float64)
    return root


class Blunt(Emulated):
    """Eigenvalues that no acceptance lets pass."""

    def eigh(self, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w, v = super().eigh(g)
        return w * 1.01, v


class Coarse(Emulated):
    """Factors that lose their last bits, after spectra that are right."""

    def apply(self, x: torch.Tensor, layout: int, t: torch.Tensor, out: torch.Tensor) -> None:
        super().apply(x, layout, t, out)
        out.mul_(1 + 1e-3 * torch.rand(out.shape, generator=torch.Generator().manual_seed(0)))


def on_gpu(monkeypatch: pytest.MonkeyPatch, backend: type[Emulated] = Emulated) -> None:
    monkeypatch.setattr(gpu, "available", lambda: True)
    monkeypatch.setattr(gpu, "kernels", backend)


def squeeze(
    source: Path, out: Path, budget: str, layouts: Sequence[Layout] = ("ragged", "padded"), **options: Any
) -> Compressed:
    return compress([source], parse_budget(budget), out, **{"cache": None, "layouts": layouts, **options})


def same_fleet(folder: Path, other: Path, layouts: Sequence[Layout] = ("ragged", "padded")) -> None:
    """Equal manifests but for what rounding moves, weights whose hashes they state, updates within BF16's rounding."""
    ours, theirs = load_manifest(folder), load_manifest(other)
    rounded = {
        "retained_energy",
        "optimality_gap",
        "allocation_sha256",
    }  # the hash is of a file with the other two
    assert ours.fleet.model_dump(exclude=rounded) == theirs.fleet.model_dump(exclude=rounded)
    assert list(ours.adapters) == list(theirs.adapters)
    for name, entry in ours.adapters.items():
        plain = theirs.adapters[name]
        assert entry.weights_sha256 == plain.weights_sha256
        assert list(entry.modules) == list(plain.modules)
        for module, record in entry.modules.items():
            wanted = plain.modules[module]
            varying = {"certificate", "path"}
            assert record.model_dump(exclude=varying) == wanted.model_dump(exclude=varying)
            for key in ("retained_energy", "relative_error"):
                assert getattr(record.certificate, key) == pytest.approx(
                    getattr(wanted.certificate, key), abs=1e-6
                )
            assert record.certificate.action_error == pytest.approx(
                wanted.certificate.action_error, rel=0.3, abs=1e-4
            )
        for layout in layouts:
            mine, twin = (open_adapter(root / layout / name) for root in (folder, other))
            assert mine.config == twin.config
            assert mine.modules == twin.modules
            assert mine.passthrough == twin.passthrough
            assert mine.weights_path.stat().st_size == twin.weights_path.stat().st_size
            assert sha256_file(mine.weights_path) == entry.layouts[layout].sha256
            assert load_adapter_manifest(mine.path).adapter == entry
            tensors, others = load_file(mine.weights_path), load_file(twin.weights_path)
            assert tensors.keys() == others.keys()
            for key in mine.passthrough:
                assert torch.equal(tensors[key], others[key])
            for lora in mine.modules:
                updates = [t[lora.b_key].double() @ t[lora.a_key].double() for t in (tensors, others)]
                assert torch.linalg.norm(updates[0] - updates[1]) <= 0.01 * torch.linalg.norm(updates[1])


@pytest.mark.parametrize("dtype", ["bfloat16", "source"])
@pytest.mark.parametrize("budget", ["1/4", "1"])
def test_it_is_what_the_cpu_chain_gives(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: str, dtype: str
) -> None:
    squeeze(folders, tmp_path / "cpu", budget, cache=tmp_path / "cache", dtype=dtype)
    on_gpu(monkeypatch)
    done = squeeze(folders, tmp_path / "gpu", budget, dtype=dtype)
    assert set(done.seconds) == {"verify", "hash", "load", "factor", "allocate", "export"}
    assert all(seconds >= 0 for seconds in done.seconds.values())
    monkeypatch.undo()
    ours, theirs = (load_manifest(tmp_path / name) for name in ("gpu", "cpu"))
    for name, entry in ours.adapters.items():  # another machine, another key
        assert entry.factor_key != theirs.adapters[name].factor_key
    same_fleet(tmp_path / "gpu", tmp_path / "cpu")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "cpu", "gpu"]


def test_a_cache_on_a_gpu_gives_the_same(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu(monkeypatch)
    squeeze(folders, tmp_path / "deferred", "1/3")
    squeeze(folders, tmp_path / "cached", "1/3", cache=tmp_path / "cache")
    same_fleet(tmp_path / "deferred", tmp_path / "cached")
    deferred_keys, keys = (
        {name: entry.factor_key for name, entry in load_manifest(tmp_path / folder).adapters.items()}
        for folder in ("deferred", "cached")
    )
    assert deferred_keys == keys


@pytest.mark.parametrize("backend", [Emulated, Blunt, Coarse])
@pytest.mark.parametrize("dtype", ["bfloat16", "source"])
def test_a_cached_fleet_is_exported_on_the_gpu_as_from_its_cache(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, backend: type[Emulated]
) -> None:
    on_gpu(monkeypatch)
    options: dict[str, Any] = {"cache": tmp_path / "cache", "dtype": dtype}
    monkeypatch.setattr(
        "loraforge.compress.cached_source", lambda fleet, entries, **_: CachedFleet(fleet, entries)
    )
    squeeze(folders, tmp_path / "plain", "1/4", **options)
    monkeypatch.undo()
    on_gpu(monkeypatch, backend)
    read: list[Path] = []
    real = CachedAdapter.factors

    def counted(entry: CachedAdapter, *rest: Any) -> Any:
        read.append(entry.path)
        return real(entry, *rest)

    monkeypatch.setattr(CachedAdapter, "factors", counted)
    done = squeeze(folders, tmp_path / "rebuilt", "1/4", **options)
    same_fleet(tmp_path / "rebuilt", tmp_path / "plain")
    everything = {entry.factor_key for entry in done.manifest.adapters.values()}
    # one is stored as FP64, of which a GPU makes nothing
    stored = {done.manifest.adapters["e"].factor_key} if backend is Emulated else everything
    assert {path.stem for path in read} == stored


def test_a_fleet_larger_than_the_device_goes_in_shards(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu(monkeypatch)
    squeeze(folders, tmp_path / "one", "1/4")
    loads: list[int] = []
    real = deferred.load_fleet

    def counted(adapters: Any, *rest: Any) -> Any:
        loads.append(len(adapters))
        return real(adapters, *rest)

    monkeypatch.setattr(deferred, "load_fleet", counted)
    monkeypatch.setattr(shards, "adapter_bytes", lambda adapter: 1)
    monkeypatch.setattr(shards, "device_room", lambda device: 4)
    squeeze(folders, tmp_path / "many", "1/4")
    assert loads == [2, 2, 1, 2, 2]  # measured, and built but for the last: FP64 alone
    same_fleet(tmp_path / "many", tmp_path / "one")


def test_directions_that_do_not_fit_after_all_go_through_the_cache_beside_the_output(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crowded(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    on_gpu(monkeypatch)
    squeeze(folders, tmp_path / "fits", "1/4")
    monkeypatch.setattr(deferred, "build_kept", crowded)
    squeeze(folders, tmp_path / "crowded", "1/4")
    same_fleet(tmp_path / "crowded", tmp_path / "fits")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["crowded", "fits"]


def test_nan_is_named_and_nothing_is_written(
    tmp_path: Path, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_adapter(tmp_path / "in/good")
    path = make_adapter(tmp_path / "in/bad", seed=3) / "adapter_model.safetensors"
    tensors = load_file(path)
    key = next(key for key in tensors if "layers.1" in key and "v_proj" in key)
    tensors[key][0, 0] = float("nan")
    save_file(tensors, path)
    on_gpu(monkeypatch)
    with pytest.raises(InputError, match="holds NaN") as caught:
        squeeze(tmp_path / "in", tmp_path / "out", "1/2")
    assert (caught.value.path, caught.value.key) == (str(path), key)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("backend", [Blunt, Coarse])
def test_what_the_gpu_does_not_vouch_for_goes_to_the_cpu(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: type[Emulated]
) -> None:
    squeeze(folders, tmp_path / "cpu", "1/4", cache=tmp_path / "cache")
    on_gpu(monkeypatch, backend)
    squeeze(folders, tmp_path / "gpu", "1/4")
    monkeypatch.undo()
    same_fleet(tmp_path / "gpu", tmp_path / "cpu")


def test_a_type_that_cannot_hold_the_factors_is_refused_as_on_the_cpu(
    tmp_path: Path, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_adapter(tmp_path / "in/fine")
    make_adapter(tmp_path / "in/large", lora_alpha=1e12, seed=1)
    on_gpu(monkeypatch)
    with pytest.raises(InputError, match=r"values up to \S+ overflow float16") as caught:
        squeeze(tmp_path / "in", tmp_path / "out", "1/2", dtype="float16")
    assert caught.value.path == str(tmp_path / "in/large")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_an_empty_fleet_and_one_adapter(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu(monkeypatch)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no PEFT adapter found"):
        squeeze(tmp_path / "empty", tmp_path / "out", "1/2")
    done = squeeze(folders / "d", tmp_path / "out", "1/2")
    [entry] = done.manifest.adapters.values()
    assert {module.k for module in entry.modules.values()} == {1}
