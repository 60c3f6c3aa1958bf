"""The factor stage of a fleet on a GPU, over emulated kernels: shards, entries, fallbacks, resuming, processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_folders import MakeAdapter, write_mixed_fleet
from safetensors.torch import load_file, save_file

from loraforge.errors import InputError, LoraForgeError
from loraforge.factor import fleet as factor_fleet
from loraforge.factor import gpu
from loraforge.factor.cache import CachedAdapter, cache_path
from loraforge.factor.engine import factorise_adapter
from loraforge.factor.fleet import factorise_fleet
from loraforge.factor.gpu import drain, entries, loader, shards
from loraforge.factor.gpu.fleet import factorise_together
from loraforge.factor.gpu.loader import load_fleet
from loraforge.factor.gpu.ops import Emulated
from loraforge.factor.gpu.processes import balanced
from loraforge.factor.pool import worker_pool
from loraforge.factor.stages import Stages
from loraforge.files import sha256_file
from loraforge.fleet.peft_io import Adapter, open_adapter, open_fleet
from loraforge.tensor_file import host_views

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixed_fleet(tmp_path_factory.mktemp("fleet"))


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "available", lambda: True)
    monkeypatch.setattr(gpu, "kernels", Emulated)


def in_shards_of(monkeypatch: pytest.MonkeyPatch, size: int) -> list[list[str]]:
    """Let at most ``size`` adapters fit at once; the shards that are tried."""
    monkeypatch.setattr(shards, "adapter_bytes", lambda adapter: 1)
    monkeypatch.setattr(shards, "device_room", lambda device: 2 * size)
    tried: list[list[str]] = []
    real = entries.factorise_together

    def counted(adapters: list[Adapter], *rest: Any) -> Any:
        tried.append([adapter.name for adapter in adapters])
        return real(adapters, *rest)

    monkeypatch.setattr(entries, "factorise_together", counted)
    return tried


def same(one: CachedAdapter, other: CachedAdapter, tolerance: float) -> None:
    for name, record in one.modules.items():
        s, t = one.spectrum(name), other.spectrum(name)
        assert np.abs(s - t).max() <= tolerance * (t[0] or 1)
        updates = [b.double() @ a.double() for a, b in (one.factors(name), other.factors(name))]
        assert torch.linalg.norm(updates[0] - updates[1]) <= 3e-6 * (t[0] or 1) * record.rank**0.5


@pytest.mark.usefixtures("on_gpu")
def test_entries_are_those_of_the_cpu_within_rounding(folders: Path, tmp_path: Path) -> None:
    fleet = open_fleet([folders])
    stages = Stages()
    made = factorise_fleet(fleet, tmp_path / "gpu", stages=stages)
    assert set(stages.seconds) == {"hash", "load", "factor"}
    cpu = factorise_fleet(fleet, tmp_path / "cpu", method="reference")
    for entry, plain, adapter in zip(made, cpu, fleet, strict=True):
        assert entry.adapter == plain.adapter == adapter.name
        assert list(entry.modules) == [module.name for module in adapter.modules]
        same(entry, plain, 1e-6)
        paths = {record.path for record in entry.modules.values()}
        assert paths == ({"tsqr"} if adapter.name == "e" else {"gram"})
        assert entry.timing is not None
        assert 0 < sum(entry.timing.stages.values()) <= entry.timing.seconds * 1.001
        assert adapter.weights_sha256 == sha256_file(adapter.weights_path)
    assert factorise_fleet(fleet, tmp_path / "gpu") == made


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("size", [1, 2])
def test_neighbours_do_not_matter_and_results_repeat_bitwise(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    fleet = open_fleet([folders])
    together = factorise_fleet(fleet, tmp_path / "together")
    again = factorise_fleet(fleet, tmp_path / "again")
    assert [e.path.read_bytes() for e in together] == [e.path.read_bytes() for e in again]
    tried = in_shards_of(monkeypatch, size)
    for one, other in zip(factorise_fleet(fleet, tmp_path / "apart"), together, strict=True):
        same(one, other, 1e-9)
    names = ["a", "b", "c", "d", "e"]
    assert tried == [names[start : start + size] for start in range(0, 5, size)]


@pytest.mark.usefixtures("on_gpu")
def test_what_is_cached_is_not_loaded_and_a_damaged_entry_is_made_anew(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = open_fleet([folders])
    made = factorise_fleet(fleet, tmp_path)
    whole = made[1].path.read_bytes()
    made[1].path.write_bytes(whole[:-9])
    made[3].path.unlink()
    tried = in_shards_of(monkeypatch, 5)
    factorise_fleet(fleet, tmp_path)
    assert tried == [["b", "d"]]
    assert made[1].path.read_bytes() == whole


@pytest.mark.usefixtures("on_gpu")
def test_an_interrupted_run_resumes_with_the_shards_that_are_missing(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = open_fleet([folders])
    tried = in_shards_of(monkeypatch, 2)
    real = entries.factorise_together

    def interrupted(adapters: list[Adapter], *rest: Any) -> Any:
        if adapters[0].name == "c":
            raise KeyboardInterrupt
        return real(adapters, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(entries, "factorise_together", interrupted)
        with pytest.raises(KeyboardInterrupt):
            factorise_fleet(fleet, tmp_path)
    kept = {path.name for path in (tmp_path / "factors").glob("*.safetensors")}
    assert kept <= {cache_path(adapter, tmp_path).name for adapter in fleet[:2]}
    assert not list((tmp_path / "factors").glob("*.tmp"))
    tried.clear()
    factorise_fleet(fleet, tmp_path)
    assert [name for shard in tried for name in shard] == [
        adapter.name for adapter in fleet if cache_path(adapter, tmp_path).name not in kept
    ]


@pytest.mark.usefixtures("on_gpu")
def test_a_shard_that_does_not_fit_is_halved_and_an_adapter_that_does_not_goes_to_the_cpu(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = open_fleet([folders])
    tried: list[list[str]] = []

    def crowded(adapters: list[Adapter], *rest: Any) -> Any:
        tried.append([adapter.name for adapter in adapters])
        if len(adapters) > 2 or adapters[0].name == "c":
            raise torch.OutOfMemoryError("no room")
        return factorise_together(adapters, *rest)

    monkeypatch.setattr(entries, "factorise_together", crowded)
    made = factorise_fleet(fleet, tmp_path / "gpu")
    assert tried == [["a", "b", "c", "d", "e"], ["a", "b"], ["c", "d", "e"], ["c"], ["d", "e"]]
    for entry, plain in zip(made, factorise_fleet(fleet, tmp_path / "cpu", method="reference"), strict=True):
        same(entry, plain, 1e-6)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nan_is_named_by_file_and_tensor(
    tmp_path: Path, make_adapter: MakeAdapter, dtype: torch.dtype
) -> None:
    make_adapter(tmp_path / "in/good")
    key = break_value(make_adapter(tmp_path / "in/bad", seed=3, dtype=dtype))
    with pytest.raises(InputError, match="holds NaN or infinite values; the training run diverged") as caught:
        factorise_fleet(open_fleet([tmp_path / "in"]), tmp_path / "cache")
    assert caught.value.path == str(tmp_path / "in/bad/adapter_model.safetensors")
    assert caught.value.key == key


def break_value(folder: Path) -> str:
    """Put a NaN into one tensor, and return its key."""
    tensors = load_file(folder / "adapter_model.safetensors")
    key = next(key for key in tensors if "layers.1" in key and "v_proj.lora_B" in key)
    tensors[key][0, 0] = float("nan")
    save_file(tensors, folder / "adapter_model.safetensors")
    return key


def test_modules_that_the_gpu_does_not_vouch_for_go_to_the_cpu(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Blunt(Emulated):
        def eigh(self, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            w, v = super().eigh(g)
            return w * 1.01, v

    monkeypatch.setattr(gpu, "available", lambda: True)
    monkeypatch.setattr(gpu, "kernels", Blunt)
    fleet = open_fleet([folders])
    seen: list[str] = []

    def counted(adapter: Adapter, **options: Any) -> Any:
        if options["done"] == {}:
            seen.append(adapter.name)
        return factorise_adapter(adapter, **options)

    monkeypatch.setattr(entries, "factorise_adapter", counted)
    factorise_fleet(fleet, tmp_path)
    assert sorted(seen) == ["a", "b", "c", "d"]  # of a zero update nothing is wrong


def test_loading_in_small_chunks_gives_every_module_its_tensors_and_every_adapter_its_hash(
    folders: Path,
) -> None:
    fleet = open_fleet([folders])
    fleet[1].state_sha256("told before")
    stages = Stages()
    loaded = load_fleet(fleet, CPU, stages, readers=3, chunk_bytes=1000)
    assert stages.seconds["hash"] > 0
    seen = []
    for group, members in zip(loaded.groups, loaded.members, strict=True):
        for row, index in enumerate(members.tolist()):
            adapter, module = loaded.modules[index]
            a, b = adapter.factors(module)
            assert torch.equal(group.a[row], a)
            assert torch.equal(group.b[row], b)
            assert group.a.dtype == a.dtype
            assert float(group.scale[row]) == module.scale
            assert (group.names or ())[row] == f"{adapter.name}: {module.name}"
            seen.append(index)
    wide = [i for i, (adapter, _) in enumerate(loaded.modules) if adapter.name == "d"]
    assert sorted(seen + wide) == list(range(len(loaded.modules)))
    assert fleet[1].weights_sha256 == "told before"
    for adapter in (fleet[0], *fleet[2:]):
        assert adapter.hashed
        assert adapter.weights_sha256 == sha256_file(adapter.weights_path)


@pytest.mark.parametrize("lead", [0, 1, 2, 4])
def test_tensors_that_lie_at_odd_places_are_loaded_whole(
    tmp_path: Path, make_adapter: MakeAdapter, lead: int
) -> None:
    folder = make_adapter(
        tmp_path / "odd", dtype=torch.bfloat16, modules_to_save=["lm_head"],
        extra={"base_model.model.lm_head.weight": torch.zeros(max(lead, 1), 1, dtype=torch.uint8)},
    )  # fmt: skip
    path = folder / "adapter_model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
    saved = [key for key in tensors if "lm_head" in key]
    order = [*saved, *(key for key in tensors if key not in saved)]
    table, data = {}, b""
    for key in order:
        raw = b"" if key in saved and not lead else bytes(next(host_views([tensors[key]])))
        shape = [0, 1] if not raw else list(tensors[key].shape)
        dtype = "U8" if key in saved else "BF16"
        table[key] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    header = json.dumps(table).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    loaded = load_fleet([open_adapter(folder)], CPU, Stages())
    for group, members in zip(loaded.groups, loaded.members, strict=True):
        for row, index in enumerate(members.tolist()):
            module = loaded.modules[index][1]
            assert torch.equal(group.a[row], tensors[module.a_key])
            assert torch.equal(group.b[row], tensors[module.b_key])


def test_a_file_cut_short_while_it_is_read(folders: Path, tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_bytes(b"1234")
    with pytest.raises(InputError, match="was truncated"):
        list(loader._pieces(path, 2, 10, [(torch.empty(8, dtype=torch.uint8), None)]))


def test_shards_keep_the_order_and_leave_room_for_two(folders: Path) -> None:
    fleet = open_fleet([folders])
    sizes = [shards.adapter_bytes(adapter) for adapter in fleet]
    assert shards.shards(fleet, sum(sizes)) == [fleet]
    parts = shards.shards(fleet, sum(sizes) - 1)
    assert [adapter for part in parts for adapter in part] == fleet
    assert len(parts) > 1
    for part in parts:
        assert len(part) == 1 or 2 * sum(map(shards.adapter_bytes, part)) < sum(sizes)
    assert shards.shards(fleet, sum(sizes), most=1) == [[adapter] for adapter in fleet]
    assert shards.shards(fleet, 1) == [[adapter] for adapter in fleet]
    assert shards.shards([], 1) == []


@pytest.mark.parametrize("count", [1, 2, 3])
def test_parts_are_balanced(count: int) -> None:
    costs = [5.0, 1.0, 1.0, 1.0, 4.0, 2.0]
    parts = balanced(costs, count)
    assert sorted(index for part in parts for index in part) == list(range(6))
    loads = [sum(costs[index] for index in part) for part in parts]
    assert max(loads) - min(loads) <= 1


def test_two_processes_meet_in_the_cache(folders: Path, tmp_path: Path) -> None:
    fleet = open_fleet([folders])
    made = factorise_fleet(fleet, tmp_path / "two", devices=("cpu", "cpu"))
    assert [entry.adapter for entry in made] == [adapter.name for adapter in fleet]
    for entry, plain in zip(made, factorise_fleet(fleet, tmp_path / "one"), strict=True):
        same(entry, plain, 1e-6)
        assert entry.timing is not None


def test_an_error_in_one_process_is_raised_as_it_is(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    make_adapter(tmp_path / "in/good")
    key = break_value(make_adapter(tmp_path / "in/bad", seed=3))
    with pytest.raises(InputError, match="holds NaN") as caught:
        factorise_fleet(open_fleet([tmp_path / "in"]), tmp_path / "cache", devices=("cpu", "cpu"))
    assert caught.value.key == key


def test_a_device_that_does_not_exist_ends_in_one_line(folders: Path, tmp_path: Path) -> None:
    with pytest.raises(LoraForgeError, match="Error"):
        factorise_fleet(open_fleet([folders]), tmp_path / "cache", devices=("cpu", "nonsense"))


@pytest.mark.usefixtures("on_gpu")
def test_one_adapter_alone(folders: Path, tmp_path: Path) -> None:
    adapter = open_adapter(folders / "b")
    [entry] = factorise_fleet([adapter], tmp_path / "gpu", devices=("cpu", "cpu"))
    with worker_pool(1) as pool:
        plain = factorise_adapter(adapter, method="reference", pool=pool, stages=Stages())
    for name, wanted in plain.items():
        assert np.allclose(entry.spectrum(name), wanted.s.numpy(), atol=1e-6)


def test_hashes_are_told_once(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = open_fleet([folders])
    factor_fleet.hash_weights(fleet)
    refuse: Callable[[Path], str] = lambda path: pytest.fail(f"{path} is hashed twice")  # noqa: E731
    monkeypatch.setattr("loraforge.fleet.weight_files.sha256_file", refuse)
    factor_fleet.hash_weights(fleet)
    assert [adapter.weights_sha256 for adapter in fleet] == [
        sha256_file(adapter.weights_path) for adapter in fleet
    ]


@pytest.mark.parametrize("size", [8, 60, 1 << 20])
def test_what_is_drained_together_is_every_byte_in_order(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(shape, generator=generator).to(dtype)
        for shape, dtype in (
            ((3, 5), torch.float64),
            ((1, 1), torch.float64),
            ((0, 4), torch.float32),
            ((9, 7), torch.float32),
            ((33, 5), torch.bfloat16),
            ((1, 3), torch.bfloat16),
        )
    ]
    tensors.insert(4, torch.randn(12, 9, generator=generator)[:, :4])
    batches = list(drain._batches(tensors, size))
    packed = [drain._packed(pieces) for pieces in batches]
    assert all(0 < piece.nbytes <= size for piece in packed)
    assert b"".join(host_views(packed)) == b"".join(host_views(tensors))
    if size > 1 << 10:
        assert [piece.dtype for piece in packed] == [torch.float64, torch.float32, torch.bfloat16]
