"""Fleets on the GPU from files to files: entries, drains, shards, and compression with and without a cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_folders import MakeAdapter, write_mixed_fleet
from safetensors.torch import load_file, save_file

from loraforge.allocate.budget import parse_budget
from loraforge.compress import compress
from loraforge.errors import InputError
from loraforge.export.manifest import load_manifest
from loraforge.factor.cache import CachedAdapter
from loraforge.factor.fleet import factorise_fleet
from loraforge.factor.gpu import shards
from loraforge.factor.gpu.drain import Drain
from loraforge.factor.gpu.loader import load_fleet
from loraforge.factor.stages import Stages
from loraforge.files import sha256_file
from loraforge.fleet.peft_io import open_adapter, open_fleet
from loraforge.tensor_file import write_tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDE = {"self_attn.q_proj": (640, 320), "mlp.up_proj": (1000, 320), "mlp.down_proj": (320, 1000)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, make_adapter: MakeAdapter) -> Path:
    """Ranks from 1 to 200, four types, a zero update, a tensor that is no factor."""
    root = write_mixed_fleet(tmp_path_factory.mktemp("fleet"))
    tails = ("q_proj", "up_proj", "down_proj")
    make_adapter(
        root / "f", r=200, seed=5, targets=tails, shapes=WIDE, decay=0.98, rank_pattern={"q_proj": 64}
    )
    make_adapter(root / "g", r=64, seed=6, targets=tails, shapes=WIDE, decay=0.95, dtype=torch.bfloat16)
    return root


def same(one: CachedAdapter, other: CachedAdapter) -> None:
    for name, record in one.modules.items():
        s, t = one.spectrum(name), other.spectrum(name)
        assert np.abs(s - t).max() <= 1e-6 * (t[0] or 1)
        updates = [b.double() @ a.double() for a, b in (one.factors(name), other.factors(name))]
        assert torch.linalg.norm(updates[0] - updates[1]) <= 3e-6 * (t[0] or 1) * record.rank**0.5


def test_entries_are_those_of_the_reference_and_repeat_bitwise(folders: Path, tmp_path: Path) -> None:
    fleet = open_fleet([folders])
    stages = Stages()
    made = factorise_fleet(fleet, tmp_path / "gpu", stages=stages)
    assert set(stages.seconds) == {"hash", "load", "factor"}
    again = factorise_fleet(fleet, tmp_path / "again")
    assert [entry.path.read_bytes() for entry in made] == [entry.path.read_bytes() for entry in again]
    for entry, plain in zip(made, factorise_fleet(fleet, tmp_path / "cpu", method="reference"), strict=True):
        same(entry, plain)
        paths = {record.path for record in entry.modules.values()}
        assert paths <= {"gram", "tsqr"}
    assert factorise_fleet(fleet, tmp_path / "gpu") == made


def test_neighbours_and_shards_do_not_matter(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = open_fleet([folders])
    together = factorise_fleet(fleet, tmp_path / "together")
    monkeypatch.setattr(shards, "device_room", lambda device: 1)
    for one, other in zip(factorise_fleet(fleet, tmp_path / "apart"), together, strict=True):
        same(one, other)


@pytest.mark.parametrize("slab", [7, 64, 1 << 20])
def test_a_drain_brings_every_byte(tmp_path: Path, slab: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    tensors = {
        str(n): torch.randn(n, 5, generator=generator, device="cuda").to(dtype)
        for n, dtype in ((1, torch.float32), (33, torch.bfloat16), (70, torch.float16), (9, torch.float64))
    }
    tensors["strided"] = torch.randn(40, 30, generator=generator, device="cuda")[:, :7]
    tensors["host"] = torch.arange(11)
    drain = Drain(torch.device("cuda"), slab_bytes=slab)
    write_tensors(tmp_path / "t", tensors, {}, drain)
    found = load_file(tmp_path / "t")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor.cpu())
    with drain.here():
        doubled = tensors["33"] * 2
    write_tensors(tmp_path / "t", {"doubled": doubled}, {}, drain)
    assert torch.equal(load_file(tmp_path / "t")["doubled"], doubled.cpu())


def test_loading_through_small_pinned_buffers(folders: Path) -> None:
    fleet = open_fleet([folders])
    loaded = load_fleet(fleet, torch.device("cuda"), Stages(), readers=3, chunk_bytes=10_001)
    for group, members in zip(loaded.groups, loaded.members, strict=True):
        for row, index in enumerate(members.tolist()):
            a, b = loaded.modules[index][0].factors(loaded.modules[index][1])
            assert torch.equal(group.a[row].cpu(), a)
            assert torch.equal(group.b[row].cpu(), b)
    for adapter in fleet:
        assert adapter.weights_sha256 == sha256_file(adapter.weights_path)


@pytest.mark.parametrize("room", [None, 1])
@pytest.mark.parametrize("budget", ["1/4", "1"])
def test_compression_with_and_without_a_cache_agree(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: str, room: int | None
) -> None:
    compress([folders], parse_budget(budget), tmp_path / "cached", cache=tmp_path / "cache")
    if room is not None:
        monkeypatch.setattr(shards, "device_room", lambda device: room)
    compress([folders], parse_budget(budget), tmp_path / "deferred", cache=None)
    ours, theirs = (load_manifest(tmp_path / name) for name in ("deferred", "cached"))
    for name, entry in ours.adapters.items():
        plain = theirs.adapters[name]
        assert entry.weights_sha256 == plain.weights_sha256
        ranks = [{m: record.k for m, record in e.modules.items()} for e in (entry, plain)]
        assert ranks[0] == ranks[1]
        for layout in ("ragged", "padded"):
            mine, twin = (open_adapter(tmp_path / f / layout / name) for f in ("deferred", "cached"))
            assert mine.config == twin.config
            assert sha256_file(mine.weights_path) == entry.layouts[layout].sha256
            tensors, others = load_file(mine.weights_path), load_file(twin.weights_path)
            assert all(torch.equal(tensors[key], others[key]) for key in mine.passthrough)
            for lora in mine.modules:
                updates = [t[lora.b_key].double() @ t[lora.a_key].double() for t in (tensors, others)]
                assert torch.linalg.norm(updates[0] - updates[1]) <= 0.01 * torch.linalg.norm(updates[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "cached", "deferred"]


def test_nan_is_named_by_file_and_tensor(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    make_adapter(tmp_path / "in/good")
    path = make_adapter(tmp_path / "in/bad", seed=3) / "adapter_model.safetensors"
    tensors = load_file(path)
    key = next(key for key in tensors if "layers.1" in key and "v_proj" in key)
    tensors[key][0, 0] = float("nan")
    save_file(tensors, path)
    for cache in (None, tmp_path / "cache"):
        with pytest.raises(InputError, match="holds NaN") as caught:
            compress([tmp_path / "in"], parse_budget("1/2"), tmp_path / "out", cache=cache)
        assert (caught.value.path, caught.value.key) == (str(path), key)
        assert not (tmp_path / "out").exists()


def test_two_processes_share_a_fleet(folders: Path, tmp_path: Path) -> None:
    """On one device, if there are no two: what is tested is the way there and back."""
    fleet = open_fleet([folders])
    devices = ("cuda:0", f"cuda:{torch.cuda.device_count() - 1}")
    made = factorise_fleet(fleet, tmp_path / "two", devices=devices)
    for entry, plain in zip(made, factorise_fleet(fleet, tmp_path / "one"), strict=True):
        same(entry, plain)
