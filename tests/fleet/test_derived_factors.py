"""Factors that are computed from what is stored: to the letter, in the cache's key, in locks, and beside a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from adapter_folders import MakeAdapter
from safetensors.torch import load_file, save_file

from loraforge.allocate.budget import parse_budget
from loraforge.cli import main
from loraforge.compress import compress
from loraforge.errors import InputError, IntegrityError
from loraforge.export.layouts import layout_rank, shared_ranks
from loraforge.factor.cache import cache_key
from loraforge.factor.gpu.ops import Emulated
from loraforge.fleet.lock import load_lock, save_lock
from loraforge.fleet.locking import make_lock
from loraforge.fleet.options import ReadOptions
from loraforge.fleet.peft_io import FactorReader, open_adapter
from loraforge.fleet.source import resolve_fleet
from loraforge.fleet.variants.lora import stack_experts

EXPERTS = "model.layers.0.mlp.experts"


def write(folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    stated = {"base_model_name_or_path": "tiny/base", "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    return folder


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def adalora(folder: Path) -> Path:
    stem = "base_model.model.model.layers.0.self_attn.q_proj"
    e = random(6, 1)
    e[[1, 4]] = 0
    tensors = {f"{stem}.lora_A": random(6, 32), f"{stem}.lora_E": e, f"{stem}.lora_B": random(32, 6)}
    return write(folder, tensors, peft_type="ADALORA", init_r=6, lora_alpha=3)


def experts(folder: Path, **changes: object) -> Path:
    tensors = {
        f"base_model.model.{EXPERTS}.lora_A.weight": random(3 * 4, 32),
        f"base_model.model.{EXPERTS}.lora_B.weight": random(24, 4 * 3),
    }
    config = {
        "peft_type": "LORA",
        "r": 4,
        "target_modules": None,
        "target_parameters": ["mlp.experts.down_proj"],
    }
    return write(folder, tensors, **config | changes)


def vera(folder: Path, base: Path) -> Path:
    base.mkdir()
    names = ("self_attn.q_proj", "mlp.up_proj")
    shapes = {names[0]: (32, 32), names[1]: (48, 32)}
    save_file(
        {f"{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}, base / "model.safetensors"
    )
    tensors = {"base_model.vera_A": random(8, 40), "base_model.vera_B": random(50, 8)}
    for name, (d_out, _) in shapes.items():
        tensors[f"base_model.model.{name}.vera_lambda_b"] = random(d_out, seed=len(tensors))
        tensors[f"base_model.model.{name}.vera_lambda_d"] = random(8, seed=len(tensors))
    return write(folder, tensors, peft_type="VERA", r=8, target_modules=["q_proj", "up_proj"])


def test_masked_directions_are_left_out(tmp_path: Path) -> None:
    adapter = open_adapter(adalora(tmp_path / "a"))
    [module] = adapter.modules
    a, b = adapter.factors(module)
    stored = load_file(adapter.weights_path)
    stored_a, e, stored_b = (next(t for key, t in stored.items() if key.endswith(f"lora_{x}")) for x in "AEB")
    assert (module.rank, module.dtype, a.dtype) == (4, torch.float32, torch.float64)
    assert module.scale == 3 / (6 + 1e-5)
    torch.testing.assert_close(
        b @ a, stored_b.double() @ (e.double() * stored_a.double()), rtol=0, atol=1e-13
    )


def test_all_masked_is_a_zero_update(tmp_path: Path) -> None:
    folder = adalora(tmp_path / "a")
    tensors = load_file(folder / "adapter_model.safetensors")
    zero = {key: tensor * (not key.endswith("lora_E")) for key, tensor in tensors.items()}
    save_file(zero, folder / "adapter_model.safetensors")
    [module] = open_adapter(folder).modules
    assert module.rank == 1
    assert not any(open_adapter(folder).factors(module)[0].flatten().tolist())


def test_experts_come_apart_and_together(tmp_path: Path) -> None:
    adapter = open_adapter(experts(tmp_path / "a"))
    assert [module.name for module in adapter.modules] == [f"{EXPERTS}[{index}]" for index in range(3)]
    pairs = [adapter.factors(module) for module in adapter.modules]
    stored = load_file(adapter.weights_path)
    a, b = stack_experts(pairs)
    assert torch.equal(a, stored[adapter.modules[0].a_key])
    assert torch.equal(b, stored[adapter.modules[0].b_key])
    ranks = {module.name: k for module, k in zip(adapter.modules, (1, 3, 2), strict=True)}
    assert set(shared_ranks(adapter.modules, ranks).values()) == {3}
    assert layout_rank("ragged", shared_ranks(adapter.modules, ranks)) == 3


def test_a_stack_is_read_and_checked_once(tmp_path: Path) -> None:
    adapter = open_adapter(experts(tmp_path / "a"))
    get = adapter.weights.reader()
    read: list[str] = []

    def counted(key: str) -> torch.Tensor:
        read.append(key)
        return get(key)

    reader = FactorReader(adapter, counted)
    for module in adapter.modules:
        reader.factors(module)
    assert sorted(read) == sorted(adapter.weights.tensors)
    tensors = load_file(adapter.weights_path)
    tensors[read[0]][0, 0] = float("nan")
    save_file(tensors, adapter.weights_path)
    with pytest.raises(InputError, match=r"lora_A\.weight: holds NaN or infinite values"):
        adapter.factors(adapter.modules[2])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"r": 5}, "are not those of experts of rank 5"),
        ({"target_parameters": "x"}, "target_parameters: must be a list of strings, not 'x'"),
        (
            {"target_parameters": ["mlp.experts.x", "mlp.experts.y"], "rank_pattern": {"x": 2}},
            f"rank_pattern: gives parameters of {EXPERTS} different ranks",
        ),
    ],
)
def test_experts_that_do_not_fit(tmp_path: Path, changes: dict[str, object], problem: str) -> None:
    with pytest.raises(InputError) as caught:
        open_adapter(experts(tmp_path / "a", **changes))
    assert problem in str(caught.value)


def test_vera_takes_its_shapes_from_the_base_model(tmp_path: Path) -> None:
    folder, base = vera(tmp_path / "a", tmp_path / "base"), tmp_path / "base"
    adapter = open_adapter(folder, options=ReadOptions(base=base))
    assert {module.name: (module.d_in, module.d_out) for module in adapter.modules} == {
        "mlp.up_proj": (32, 48),
        "self_attn.q_proj": (32, 32),
    }
    before = cache_key(adapter)
    save_file({"self_attn.q_proj.weight": torch.zeros(32, 32), "mlp.up_proj.weight": torch.zeros(48, 16)},
              base / "model.safetensors")  # fmt: skip
    assert cache_key(open_adapter(folder, options=ReadOptions(base=base))) != before
    save_file({"self_attn.q_proj.weight": torch.zeros(32, 32)}, base / "model.safetensors")
    with pytest.raises(InputError, match=r"the base model has no linear map mlp\.up_proj of 48 outputs"):
        open_adapter(folder, options=ReadOptions(base=base))


def test_plain_adapters_keep_their_key(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    assert open_adapter(make_adapter(tmp_path / "a")).derivation == {}
    assert open_adapter(adalora(tmp_path / "b")).derivation["derived"]


def shard(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    table: dict[str, str] = {}
    for number, key in enumerate(tensors):
        table[key] = f"adapter_model-{number % 2 + 1:05}-of-00002.safetensors"
    for name in set(table.values()):
        save_file({key: tensor for key, tensor in tensors.items() if table[key] == name}, folder / name)
    (folder / "adapter_model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


def test_locks_name_every_shard(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    folder, lock = make_adapter(tmp_path / "a"), tmp_path / "x.lock.json"
    shard(folder)
    save_lock(make_lock([folder], lock, name="x"), lock)
    names = [file.name for file in load_lock(lock).adapters[0].files]
    assert names[1:] == [
        "adapter_model.safetensors.index.json",
        "adapter_model-00001-of-00002.safetensors",
        "adapter_model-00002-of-00002.safetensors",
    ]
    [adapter] = resolve_fleet(lock)
    assert not adapter.hashed
    before = adapter.weights_sha256
    path = folder / names[-1]
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    assert open_adapter(folder).weights_sha256 != before
    with pytest.raises(IntegrityError, match=names[-1]):
        resolve_fleet(lock)


def exit_code(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    return int(stopped.value.code or 0)


def test_every_command_that_opens_adapters_takes_the_options(
    tmp_path: Path, make_adapter: MakeAdapter
) -> None:
    fleet, lock, cache = tmp_path / "fleet", tmp_path / "x.lock.json", ("--cache", tmp_path / "cache")
    folder = make_adapter(fleet / "a")
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    allocation = tmp_path / "allocation.json"
    commands: list[tuple[object, ...]] = [
        ("fleet", "lock", fleet, "-o", lock),
        ("fleet", "verify", lock),
        ("factor", lock, *cache),
        ("allocate", lock, "-o", allocation, "--budget", "1/2", *cache),
        ("export", allocation, lock, "--out", tmp_path / "out", *cache),
        ("compress", fleet, "--out", tmp_path / "again", "--budget", "1/2", *cache),
    ]
    for command in commands:
        assert exit_code(*command) == 3
        assert exit_code(*command, "--allow-pickle") == 0
    for layout in ("ragged", "padded"):
        one, two = (tmp_path / out / layout / "a" / "adapter_model.safetensors" for out in ("out", "again"))
        assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("cached", [True, False], ids=["cache", "no-cache"])
def test_a_gpu_leaves_them_to_the_cpu(
    tmp_path: Path, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    fleet = tmp_path / "fleet"
    make_adapter(fleet / "plain", targets=("q_proj",))
    make_adapter(fleet / "shards", targets=("q_proj",), seed=1)
    shard(fleet / "shards")
    adalora(fleet / "ada")
    experts(fleet / "experts")

    def run(out: str) -> dict[str, torch.Tensor]:
        cache = tmp_path / f"{out}.cache" if cached else None
        compress([fleet], parse_budget("1/2"), tmp_path / out, cache=cache, dtype="float32")
        products: dict[str, torch.Tensor] = {}
        for path in sorted((tmp_path / out / "ragged").rglob("*.safetensors")):
            tensors = load_file(path)
            for key, a in tensors.items():
                if "lora_A" in key:
                    products[f"{path.parent.name}: {key}"] = tensors[key.replace("lora_A", "lora_B")] @ a
        return products

    wanted = run("cpu")
    monkeypatch.setattr("loraforge.factor.gpu.available", lambda: True)
    monkeypatch.setattr("loraforge.factor.gpu.kernels", Emulated)
    got = run("gpu")
    assert got.keys() == wanted.keys()
    assert len(got) == 2 + 2 + 1 + 1
    for key, product in wanted.items():
        torch.testing.assert_close(got[key], product, rtol=1e-4, atol=1e-5)
