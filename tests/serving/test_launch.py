"""The command line that serves a fleet: what is read off manifests and headers, and what is refused."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest
import torch
from adapter_folders import MakeAdapter
from launch_lines import Launcher, new_base, new_fleet, value_of

from loraforge.allocate.budget import parse_budget
from loraforge.compress import compress
from loraforge.errors import InputError, UsageError
from loraforge.runtime.packed import Layout
from loraforge.runtime.ranks import Projection
from loraforge.runtime.vllm import SWITCH, version
from loraforge.serving.engines import VLLM_SERVER
from loraforge.serving.launch import command, find_base, launch, rank_hints, read_fleet

_POINT = importlib.metadata.EntryPoint("loraforge", "loraforge.runtime.vllm:register", version.PLUGINS)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return new_base(tmp_path / "base")


@pytest.fixture
def fleet(tmp_path: Path, make_adapter: MakeAdapter) -> Path:
    return new_fleet(tmp_path / "fleet", make_adapter, rank=8)


@pytest.fixture
def launcher(capsys: pytest.CaptureFixture[str]) -> Launcher:
    return Launcher("vllm", capsys)


def test_plain_adapters(fleet: Path, base: Path) -> None:
    served = read_fleet(fleet)
    line = command(launch(served, base=str(base), port=8123), "python", ["--enforce-eager"])
    assert line[:3] == ["python", "-m", VLLM_SERVER]
    assert value_of(line, "--model") == str(base)
    assert value_of(line, "--served-model-name") == "tiny/base"
    assert (value_of(line, "--host"), value_of(line, "--port")) == ("127.0.0.1", "8123")
    assert (value_of(line, "--max-loras"), value_of(line, "--max-cpu-loras")) == ("2", "2")
    assert value_of(line, "--max-lora-rank") == "8"
    assert line[line.index("--lora-modules") + 1 : -1] == [
        f"{name}={fleet / name}" for name in ("all", "few")
    ]
    assert line[-1] == "--enforce-eager"
    # of the fused group of `few` its v_proj, 6, is the largest
    assert json.loads(value_of(line, "--additional-config")) == {
        "loraforge_ranks": {"down_proj": 8, "gate_up_proj": 8, "o_proj": 8, "qkv_proj": 7}
    }


def test_pool_bytes_are_those_of_the_engines_layout(fleet: Path) -> None:
    """An engine fuses what the files hold apart; the bytes are the same."""
    sizes = {item.adapter.name: item.pool_bytes(torch.bfloat16) for item in read_fleet(fleet)}
    layers = [
        projection
        for layer in ("0", "1")
        for projection in (
            Projection(f"{layer}.qkv_proj", 32, (32, 16, 16)),
            Projection(f"{layer}.o_proj", 32, (32,)),
            Projection(f"{layer}.gate_up_proj", 32, (48, 48)),
            Projection(f"{layer}.down_proj", 48, (32,)),
        )
    ]
    layout = Layout(layers, torch.bfloat16)
    assert sizes["all"] == layout.bytes({its.name: [8] * len(its.channels) for its in layers})
    assert sizes["few"] == layout.bytes({f"{layer}.qkv_proj": [4, 0, 6] for layer in ("0", "1")})
    assert sizes["all"] >= sum(2 * 8 * (its.d_in * len(its.channels) + sum(its.channels)) for its in layers)


def test_a_compressed_fleet_is_served_by_what_it_retains(
    fleet: Path, base: Path, tmp_path: Path, make_adapter: MakeAdapter
) -> None:
    out = tmp_path / "out"
    compress([fleet], parse_budget("1/2"), out, cache=None)
    whole, kept = read_fleet(fleet), read_fleet(out)
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    for item in kept:
        assert item.adapter.path == out / "ragged" / item.adapter.name
        modules = manifest["adapters"][item.adapter.name]["modules"]
        assert item.live == {name: module["k"] for name, module in modules.items()}
    # a folder of one layout, and one adapter, have the same from the adapter's own slice of the manifest
    for folder in (out / "padded", out / "ragged"):
        assert [item.live for item in read_fleet(folder)] == [item.live for item in kept]
    assert [item.live for item in read_fleet(out / "padded" / "all")] == [kept[0].live]
    assert [item.live for item in read_fleet(out / "manifest.json")] == [item.live for item in kept]
    sizes = [launch(served, base=str(base)).pool_bytes for served in (kept, whole)]
    assert sizes[0] is not None
    assert sizes[1] is not None
    assert 0.3 < sizes[0] / sizes[1] < 0.8
    # padding is no work, but the engine's loader needs room for it
    padded = read_fleet(out / "padded")
    assert [item.pool_bytes(torch.bfloat16) for item in padded] == [
        item.pool_bytes(torch.bfloat16) for item in kept
    ]
    assert launch(padded, base=str(base)).max_rank == 8


def test_slots_bound_the_pool(fleet: Path, base: Path) -> None:
    served = read_fleet(fleet)
    largest = max(item.pool_bytes(torch.bfloat16) for item in served)
    one = launch(served, base=str(base), slots=1)
    assert (one.slots, one.pool_bytes) == (1, largest)
    assert value_of(command(one, "python"), "--max-cpu-loras") == "2"
    assert launch(served, base=str(base), slots=9).slots == 9
    assert launch(served, base=str(base), extra=["--dtype=float32"]).pool_bytes == sum(
        item.pool_bytes(torch.float32) for item in served
    )
    with pytest.raises(
        UsageError, match=rf"{largest - 1} bytes cannot hold the 1 largest adapters.*{largest}"
    ):
        launch(served, base=str(base), slots=1, pool_bytes=largest - 1)


def test_hints_of_fused_parts_are_their_largest(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    for seed, (q, v) in enumerate([(1, 2), (5, 2), (3, 9)]):
        make_adapter(tmp_path / str(seed), r=1, rank_pattern={"q_proj": q, "v_proj": v})
    assert rank_hints(read_fleet(tmp_path)) == {"qkv_proj": 6}  # of 2, 5 and 9, twice each


def test_the_users_configuration_is_kept_beside_the_hints(fleet: Path, base: Path) -> None:
    decided = launch(read_fleet(fleet), base=str(base))
    extra = ["--additional-config", '{"loraforge_decode_steps": 4}', "--seed", "1"]
    line = command(decided, "python", extra)
    assert line.count("--additional-config") == 1
    config = json.loads(value_of(line, "--additional-config"))
    assert config == {"loraforge_decode_steps": 4, "loraforge_ranks": rank_hints(read_fleet(fleet))}
    assert line[-2:] == ["--seed", "1"]
    for text, problem in (("{", "is no JSON"), ("[]", "is no JSON object")):
        with pytest.raises(UsageError, match=problem):
            command(decided, "python", [f"--additional-config={text}"])
    for option in (
        "--port",
        "--host=0.0.0.0",
        "--model",
        "--max_loras=2",
        "--lora-modules",
        "--no-enable-lora",
    ):
        with pytest.raises(UsageError, match="is decided by loraforge serve vllm; "):
            command(decided, "python", [option])
    for option in ('--additional-config={"loraforge_pool_bytes": 1}', "--loraforge_pool_bytes=1"):
        with pytest.raises(UsageError, match="is decided by loraforge serve vllm; pass --pool-bytes"):
            command(decided, "python", [option])
    line = command(decided, "python", ["--additional_config", '{"a": 1}'])  # as the engine takes it too
    assert json.loads(value_of(line, "--additional-config"))["a"] == 1
    assert "--additional_config" not in line


def test_an_engine_without_the_plugin_gets_its_own_options_alone(fleet: Path, base: Path) -> None:
    line = command(launch(read_fleet(fleet), base=str(base), plugin=False), "python")
    assert not any("loraforge" in argument for argument in line if "=" not in argument)
    assert "--additional-config" not in line


def test_the_size_of_a_shadow_pool_is_left_to_the_plugin(fleet: Path, base: Path) -> None:
    extra = ["--loraforge-pool", "shadow"]
    decided = launch(read_fleet(fleet), base=str(base), extra=extra)
    line = command(decided, "python", extra)
    assert "--loraforge-pool-bytes" not in line
    assert value_of(line, "--loraforge-pool") == "shadow"
    assert "--additional-config" in line
    stated = ["--additional-config", '{"loraforge_pool": "shadow"}']
    assert launch(read_fleet(fleet), base=str(base), extra=stated).pool_bytes is None
    assert launch(read_fleet(fleet), base=str(base), extra=[*stated, "--loraforge-pool=ragged"]).pool_bytes


def test_adapters_in_float32_take_twice_the_room(fleet: Path, base: Path) -> None:
    served = read_fleet(fleet)
    halves, whole = (
        launch(served, base=str(base), extra=extra).pool_bytes
        for extra in (["--dtype=float32", "--lora_dtype", "bfloat16"], ["--lora-dtype", "float32"])
    )
    assert halves == sum(item.pool_bytes(torch.bfloat16) for item in served)
    assert whole == sum(item.pool_bytes(torch.float32) for item in served)


def test_names_that_the_short_form_would_break(tmp_path: Path, make_adapter: MakeAdapter, base: Path) -> None:
    make_adapter(tmp_path / "fleet" / "a=b,c")
    line = command(launch(read_fleet(tmp_path / "fleet"), base=str(base)), "python")
    assert json.loads(line[-1]) == {"name": "a=b,c", "path": str(tmp_path / "fleet" / "a=b,c")}


def test_the_base_model(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_base("org/model", None) == "org/model"
    assert find_base("org/model", str(base)) == str(base)
    assert find_base(str(base), None) == str(base)
    monkeypatch.chdir(tmp_path)
    assert find_base("base", None) == str(base)
    for stated, problem in (
        ("", "the adapters name no base model"),
        ("Model-1B", "base model not found"),
        (str(tmp_path / "none"), "base model not found"),
        ("~nobody-of-that-name/model", "base model not found"),
        (str(tmp_path), "is no model: it has no config.json"),
    ):
        with pytest.raises(InputError, match=problem) as caught:
            find_base(stated, None)
        assert caught.value.key == "--base"


def test_a_dry_run_prints_the_line_and_needs_no_engine(fleet: Path, base: Path, launcher: Launcher) -> None:
    line = launcher.dry(fleet, "--base", base, "--", "--enforce-eager", "--dtype", "half")
    assert line[2] == VLLM_SERVER
    assert line[-3:] == ["--enforce-eager", "--dtype", "half"]


def test_what_cannot_be_served_is_one_line(
    tmp_path: Path, fleet: Path, base: Path, make_adapter: MakeAdapter, launcher: Launcher
) -> None:
    (tmp_path / "empty").mkdir()
    make_adapter(tmp_path / "two" / "a")
    make_adapter(tmp_path / "two" / "b", base="other/base")
    make_adapter(tmp_path / "big" / "a", r=600, shapes={"self_attn.q_proj": (640, 640)}, targets=["q_proj"])
    for folder, code, problem in (
        (tmp_path / "empty", 3, "no PEFT adapter found"),
        (tmp_path / "absent", 3, "folder not found"),
        (tmp_path / "two", 3, "base model is 'other/base'"),
        (tmp_path / "big", 3, "rank 600 is more than the engine's largest, 512"),
    ):
        found, out, err = launcher.run(folder, "--base", base, "--dry-run")
        assert (found, out) == (code, "")
        assert problem in err
        assert err.count("\n") == 1


def test_an_unsupported_engine_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: Launcher
) -> None:
    monkeypatch.setattr(version, "installed", list)
    monkeypatch.delenv(SWITCH, raising=False)
    code, _, err = launcher.run(tmp_path / "absent")
    assert code == 7
    assert "vLLM is not installed; pip install 'loraforge[vllm]'" in err
    monkeypatch.setattr(version, "installed", lambda: [version.Engine("vllm", "9", "vllm 9 is new")])
    assert "vllm 9 is new" in launcher.run(tmp_path / "absent")[2]
    monkeypatch.setattr(version, "installed", lambda: [version.Engine("vllm", "9", None)])
    for found, problem in (((), "not installed as a package"), ((_POINT,), "leaves the plugin out")):
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group, found=found: found)
        monkeypatch.setenv("VLLM_PLUGINS", "other")
        assert problem in launcher.run(tmp_path / "absent")[2]
    monkeypatch.setenv("VLLM_PLUGINS", "other,loraforge")
    assert "folder not found" in launcher.run(tmp_path / "absent")[2]


def test_with_the_switch_off_any_engine_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: Launcher
) -> None:
    monkeypatch.setattr(version, "installed", list)
    monkeypatch.setenv(SWITCH, "0")
    code, _, err = launcher.run(tmp_path / "absent")
    assert (code, "folder not found" in err) == (3, True)


def test_an_engine_that_is_not_there_is_one_line(
    fleet: Path, base: Path, monkeypatch: pytest.MonkeyPatch, launcher: Launcher
) -> None:
    monkeypatch.setattr(version, "installed", list)
    monkeypatch.setenv(SWITCH, "0")
    code, _, err = launcher.run(fleet, "--base", base)
    assert (code, "vLLM is not installed; pip install" in err) == (7, True)


def test_a_switch_that_means_nothing(
    fleet: Path, base: Path, monkeypatch: pytest.MonkeyPatch, launcher: Launcher
) -> None:
    monkeypatch.setenv(SWITCH, "yes")
    code, out, err = launcher.run(fleet, "--base", base, "--dry-run")
    assert (code, out) == (2, "")
    assert err == "error: LORAFORGE_VLLM: 'yes'; give 1, 0 or native\n"
    monkeypatch.setenv(SWITCH, "native")
    code, _, err = launcher.run(fleet, "--base", base, "--dry-run", "--pool-bytes", str(1 << 30))
    assert (code, "LORAFORGE_VLLM=native serves without it" in err) == (2, True)
