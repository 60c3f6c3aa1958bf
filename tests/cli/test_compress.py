"""``compress`` is its stages in one call; ``export`` is the last of them; ``doctor`` runs anywhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from loraforge.allocate.allocation import load_allocation, save_allocation
from loraforge.allocate.budget import parse_budget
from loraforge.compress import compress
from loraforge.errors import InputError, IntegrityError, UsageError
from loraforge.export.manifest import Manifest, load_adapter_manifest, load_manifest
from loraforge.export.options import parse_dtype, parse_layouts, parse_policy
from loraforge.files import sha256_file
from loraforge.fleet.lock import save_lock
from loraforge.fleet.locking import make_lock

MakeAdapter = Callable[..., Path]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, make_adapter: MakeAdapter) -> Path:
    """Three adapters of mixed ranks, targets and scales, and a lock beside them."""
    folder = tmp_path_factory.mktemp("data") / "trio"
    make_adapter(folder / "a2", r=4, seed=1)
    make_adapter(
        folder / "a10", r=8, targets=("q_proj", "k_proj", "v_proj", "o_proj"), use_rslora=True, seed=2
    )
    make_adapter(folder / "mlp", r=6, targets=("up_proj", "down_proj"), rank_pattern={"up_proj": 3}, seed=3)
    lock = folder.parent / "trio.lock.json"
    save_lock(make_lock([folder], lock, name="trio"), lock)
    return folder


def loraforge(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "loraforge", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def tree(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): sha256_file(path) for path in folder.rglob("*") if path.is_file()
    }


def test_the_command_says_what_it_did_and_where_it_is(fleet: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = loraforge("compress", fleet, "--budget", "1/2", "--out", out, "--cache", tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    manifest = load_manifest(out)
    assert f"-> {manifest.fleet.spent:,}" in done.stdout
    for words in ("retained energy", "worst module", "verify", "factor", "allocate", "export"):
        assert words in done.stdout
    for place in (out / "ragged", out / "padded", out / "manifest.json"):
        assert str(place) in done.stdout
    assert f"loraforge inspect {out}" in done.stdout
    assert "factor: 3/3" in done.stderr
    assert "export: 3/3" in done.stderr


def test_stages_and_whole_give_the_same_bytes(fleet: Path, tmp_path: Path) -> None:
    lock = fleet.parent / "trio.lock.json"
    cache = tmp_path / "cache"
    whole = compress([lock], parse_budget("1/4"), tmp_path / "whole", cache=cache, policy="uniform")
    made = loraforge(
        "allocate", lock, "--cache", cache, "--budget", "1/4", "--policy", "uniform", "--out", tmp_path / "k"
    )
    assert made.returncode == 0, made.stderr
    done = loraforge("export", tmp_path / "k", lock, "--cache", cache, "--out", tmp_path / "stages")
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "stages") == tree(tmp_path / "whole")
    assert whole.manifest == load_manifest(tmp_path / "stages")


@pytest.mark.parametrize("policy", ["uniform", "spectral", "spectral-nofloor"])
@pytest.mark.parametrize("budget", [("1/3",), ("--params", 3000), ("--bytes", 7001)], ids=str)
def test_the_budget_holds_on_disk(
    fleet: Path, tmp_path: Path, policy: str, budget: tuple[str | int, ...]
) -> None:
    wanted = (
        parse_budget(str(budget[0]))
        if len(budget) == 1
        else parse_budget(**{{"--params": "params", "--bytes": "bytes_"}[str(budget[0])]: int(budget[1])})
    )
    out = tmp_path / "out"
    result = compress([fleet], wanted, out, cache=tmp_path.parent / "shared", policy=parse_policy(policy))
    stored = sum(
        tensor.numel()
        for file in (out / "ragged").glob("*/adapter_model.safetensors")
        for tensor in load_file(file).values()
    )
    spent = result.manifest.fleet
    assert stored == spent.spent == spent.budget.params - spent.slack
    assert spent.slack >= 0
    if wanted.kind != "fraction":
        assert spent.budget.params == int(wanted.amount) // (2 if wanted.kind == "bytes" else 1)


def test_layouts_and_dtypes(fleet: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    sizes = {}
    for dtype in ("bfloat16", "source"):
        out = tmp_path / dtype
        compress(
            [fleet],
            parse_budget("1/2"),
            out,
            cache=cache,
            layouts=parse_layouts("ragged"),
            dtype=parse_dtype(dtype),
        )
        assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "ragged"]
        tensors = load_file(out / "ragged" / "a2" / "adapter_model.safetensors")
        sizes[dtype] = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert sizes["source"] == 2 * sizes["bfloat16"]  # the originals are float32


def test_every_adapter_carries_its_slice(fleet: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    manifest: Manifest = compress([fleet], parse_budget("1/2"), out, cache=tmp_path / "cache").manifest
    assert list(manifest.adapters) == ["a2", "a10", "mlp"]
    for name, entry in manifest.adapters.items():
        for layout, weights in entry.layouts.items():
            part = load_adapter_manifest(out / layout / name)
            assert (part.name, part.layout, part.adapter, part.fleet) == (name, layout, entry, manifest.fleet)
            assert sha256_file(out / layout / name / "adapter_model.safetensors") == weights.sha256
            assert json.loads((out / layout / name / "adapter_config.json").read_text())["r"] == weights.rank


def test_one_adapter_alone_and_an_untouched_budget(fleet: Path, tmp_path: Path) -> None:
    result = compress([fleet / "mlp"], parse_budget("1"), tmp_path / "out", cache=tmp_path / "cache")
    [entry] = result.manifest.adapters.values()
    assert entry.compact_parameters == entry.original_parameters
    assert all(module.certificate.retained_energy == 1.0 for module in entry.modules.values())


def test_a_changed_byte_in_a_locked_fleet_is_refused(
    fleet: Path, tmp_path: Path, make_adapter: MakeAdapter
) -> None:
    folder = make_adapter(tmp_path / "one")
    lock = tmp_path / "one.lock.json"
    save_lock(make_lock([folder], lock, name="one"), lock)
    weights = folder / "adapter_model.safetensors"
    payload = bytearray(weights.read_bytes())
    payload[-1] ^= 1
    weights.write_bytes(payload)
    with pytest.raises(IntegrityError, match=re.escape(f"{weights}: SHA-256 is ")):
        compress([lock], parse_budget("1/2"), tmp_path / "out", cache=tmp_path / "cache")
    assert not (tmp_path / "out").exists()


def test_an_allocation_of_another_fleet_is_refused(fleet: Path, tmp_path: Path) -> None:
    cache, path = tmp_path / "cache", tmp_path / "k.json"
    made = loraforge("allocate", fleet, "--cache", cache, "--budget", "1/4", "--out", path)
    assert made.returncode == 0, made.stderr
    done = loraforge("export", path, fleet / "a2", "--cache", cache, "--out", tmp_path / "out")
    assert done.returncode == 3
    assert re.search(
        r"error: the allocation has adapter '(a10|mlp)', the fleet has not; allocate again", done.stderr
    )
    allocation = load_allocation(path)
    ranks = {name: dict(modules) for name, modules in allocation.ranks.items()}
    ranks["a2"]["model.layers.0.self_attn.q_proj"] = 99
    save_allocation(allocation.model_copy(update={"ranks": ranks}), path)
    done = loraforge("export", path, fleet, "--cache", cache, "--out", tmp_path / "out")
    assert done.returncode == 3
    assert "a2: model.layers.0.self_attn.q_proj: allocated rank 99 exceeds the original's 4" in done.stderr
    assert not (tmp_path / "out").exists()


def test_export_builds_the_factors_that_the_cache_lacks(fleet: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = tmp_path / "k.json"
    assert loraforge("allocate", fleet, "--cache", cache, "--budget", "1/4", "--out", path).returncode == 0
    for number, folder in enumerate((cache, tmp_path / "empty")):
        done = loraforge("export", path, fleet, "--cache", folder, "--out", tmp_path / str(number))
        assert done.returncode == 0, done.stderr
        assert ("factor: 3/3" in done.stderr) == (number == 1)
    assert tree(tmp_path / "0") == tree(tmp_path / "1")


def test_no_cache_gives_the_same_and_leaves_nothing_else(fleet: Path, tmp_path: Path) -> None:
    cached = compress([fleet], parse_budget("1/4"), tmp_path / "cached", cache=tmp_path / "cache")
    done = loraforge("compress", fleet, "--budget", "1/4", "--out", tmp_path / "out", "--no-cache")
    assert done.returncode == 0, done.stderr
    assert load_manifest(tmp_path / "out") == cached.manifest
    assert tree(tmp_path / "out") == tree(tmp_path / "cached")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "cached", "out"]


def test_more_devices_than_there_are(fleet: Path, tmp_path: Path) -> None:
    done = loraforge("compress", fleet, "--budget", "1/4", "--out", tmp_path / "out", "--devices", 99)
    assert done.returncode == 2
    assert "--devices: 99 devices asked for" in done.stderr
    assert not list(tmp_path.iterdir())


def test_unknown_options_are_usage_errors() -> None:
    for parse in (parse_policy, parse_layouts, parse_dtype):
        with pytest.raises(UsageError, match="choose from"):
            parse("nonsense")


def test_compress_needs_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no PEFT adapter found"):
        compress([tmp_path], parse_budget("1/2"), tmp_path / "out", cache=tmp_path / "cache")


@pytest.mark.parametrize("out", ["trio", "trio/a2", ".", "link", "cached"])
def test_force_never_replaces_what_is_read(
    tmp_path: Path, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    data = tmp_path / "data"
    for name in ("a2", "b3"):
        make_adapter(data / "trio" / name)
    (data / "link").symlink_to(data / "trio")
    (data / "cached").mkdir()
    before = tree(data)
    monkeypatch.chdir(tmp_path)
    done = loraforge(
        "compress", data / "trio", "--budget", "1/2", "--out", data / out, "--force",
        "--cache", data / "cached" / "cache" if out == "cached" else tmp_path / "cache",
    )  # fmt: skip
    assert done.returncode == 5, done.stdout
    assert re.fullmatch(
        r"error: \S+: would replace \S+, which is in use here; choose another output\n", done.stderr
    )
    assert tree(data) == before


def test_export_refuses_to_replace_the_originals(
    fleet: Path, tmp_path: Path, make_adapter: MakeAdapter
) -> None:
    path = tmp_path / "k.json"
    made = loraforge("allocate", fleet, "--cache", tmp_path / "cache", "--budget", "1/4", "--out", path)
    assert made.returncode == 0, made.stderr
    before = tree(fleet)
    done = loraforge("export", path, fleet, "--cache", tmp_path / "cache", "--out", fleet, "--force")
    assert done.returncode == 5
    assert tree(fleet) == before
