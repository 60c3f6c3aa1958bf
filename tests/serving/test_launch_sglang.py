"""The command line that serves a fleet in SGLang, and that the launcher never starts an engine without the plugin."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from adapter_folders import MakeAdapter
from launch_lines import Launcher, new_base, new_fleet, value_of

from loraforge.errors import UsageError
from loraforge.runtime.sglang import SWITCH, version
from loraforge.runtime.sglang.options import POOL, POOL_BYTES, RANKS
from loraforge.serving.engines import SGLANG_SERVER
from loraforge.serving.launch import launch, read_fleet
from loraforge.serving.launch_sglang import command

_POINT = importlib.metadata.EntryPoint("loraforge", "loraforge.runtime.sglang:register", version.PLUGINS)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return new_base(tmp_path / "base")


@pytest.fixture
def fleet(tmp_path: Path, make_adapter: MakeAdapter) -> Path:
    return new_fleet(tmp_path / "fleet", make_adapter, rank=9)


@pytest.fixture
def launcher(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Launcher:
    for variable in (SWITCH, POOL, POOL_BYTES, RANKS):
        monkeypatch.delenv(variable, raising=False)
    return Launcher("sglang", capsys)


def test_a_folder_of_adapters(fleet: Path, base: Path, launcher: Launcher) -> None:
    line = launcher.dry(fleet, "--base", base, "--", "--tp-size", "2")
    assert line[1:3] == ["-m", SGLANG_SERVER]
    assert value_of(line, "--model-path") == str(base)
    assert value_of(line, "--lora-backend") == "loraforge"
    assert value_of(line, "--max-loras-per-batch") == "3"  # the base model takes one
    assert value_of(line, "--max-lora-rank") == "9"  # any number, unlike vLLM's
    assert json.loads(value_of(line, "--loraforge-ranks"))["qkv_proj"] == 8  # the mean of 9 and 6, up
    needs = sum(item.pool_bytes(torch.bfloat16) for item in read_fleet(fleet))
    assert value_of(line, "--loraforge-pool-bytes") == str(needs)
    first = line.index("--lora-paths") + 1
    assert line[first:] == [f"all={fleet / 'all'}", f"few={fleet / 'few'}", "--tp-size", "2"]


def test_slots_of_adapters_and_the_pool_that_they_need(fleet: Path, base: Path, launcher: Launcher) -> None:
    line = launcher.dry(fleet, "--base", base, "--slots", "1")
    assert value_of(line, "--max-loras-per-batch") == "2"
    # a batch of two adapters and no base model pushes the base model out of its slot
    whole = launcher.dry(fleet, "--base", base)
    assert value_of(line, "--loraforge-pool-bytes") == value_of(whole, "--loraforge-pool-bytes")


def test_without_the_plugin_the_engine_gets_none_of_its_options(
    fleet: Path, base: Path, monkeypatch: pytest.MonkeyPatch, launcher: Launcher
) -> None:
    monkeypatch.setenv(SWITCH, "0")
    line = launcher.dry(fleet, "--base", base)
    assert not any("loraforge" in argument for argument in line[3:] if argument.startswith("--"))
    assert "--lora-backend" not in line


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--model-path=x", "--model-path: is decided by loraforge serve sglang; pass --base before the --"),
        ("--model_path", "--model-path: is decided"),
        ("--model", "--model: is decided"),
        ("--port", "--port: is decided by loraforge serve sglang; pass it before the --"),
        ("--max_loras_per_batch=2", "--max-loras-per-batch: is decided .* pass --slots before the --"),
        ("--lora-paths", "--lora-paths: is decided .* put the adapters into one folder"),
        ("--lora-path", "--lora-paths: is decided"),  # the engine takes the beginning of a name for it
        ("--lora-backend=csgmv", "--lora-backend: is decided .* set LORAFORGE_SGLANG=0 to serve by another"),
        ("--loraforge-pool-bytes=1", "--loraforge-pool-bytes: is decided .* pass --pool-bytes"),
    ],
)
def test_what_the_launcher_decides_is_not_given_twice(
    fleet: Path, base: Path, argument: str, says: str
) -> None:
    decided = launch(read_fleet(fleet), base=str(base), max_ranks=None)
    with pytest.raises(UsageError, match=says):
        command(decided, "python", [argument])


def test_what_the_launcher_does_not_decide_is_passed_on(fleet: Path, base: Path) -> None:
    decided = launch(read_fleet(fleet), base=str(base), max_ranks=None)
    extra = ["--loraforge-pool", "ragged", "--max-lora-rank", "64", "--tp-size=2", "-x", "value", "--"]
    assert command(decided, "python", extra)[-len(extra) :] == extra
    native = launch(read_fleet(fleet), base=str(base), max_ranks=None, plugin=False)
    assert command(native, "python", ["--lora-backend", "triton"])[-1] == "triton"


def test_a_switch_or_an_option_that_means_nothing(
    fleet: Path, base: Path, monkeypatch: pytest.MonkeyPatch, launcher: Launcher
) -> None:
    monkeypatch.setenv(SWITCH, "yes")
    code, out, err = launcher.run(fleet, "--base", base, "--dry-run")
    assert (code, out) == (2, "")
    assert err == "error: LORAFORGE_SGLANG: 'yes'; give 1, 0 or native\n"
    monkeypatch.setenv(SWITCH, "native")
    assert "LORAFORGE_SGLANG=native serves without it" in launcher.run(fleet, "--pool-bytes", 1 << 30)[2]
    monkeypatch.delenv(SWITCH)
    monkeypatch.setenv(POOL, "big")
    assert "LORAFORGE_POOL: 'big'; give ragged or shadow" in launcher.run(fleet, "--dry-run")[2]
    monkeypatch.delenv(POOL)
    monkeypatch.setenv(POOL_BYTES, "1000")
    assert "LORAFORGE_POOL_BYTES: is decided by loraforge serve sglang" in launcher.run(fleet, "--dry-run")[2]


def test_the_size_of_a_shadow_pool_is_left_to_the_plugin_of_sglang(
    fleet: Path, base: Path, monkeypatch: pytest.MonkeyPatch, launcher: Launcher
) -> None:
    assert "--loraforge-pool-bytes" not in launcher.dry(
        fleet, "--base", base, "--", "--loraforge-pool", "shadow"
    )
    monkeypatch.setenv(POOL, "shadow")
    assert "--loraforge-pool-bytes" not in launcher.dry(fleet, "--base", base)
    line = launcher.dry(fleet, "--base", base, "--", "--loraforge-pool=ragged")
    assert "--loraforge-pool-bytes" in line


def _absent(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


def test_names_that_the_engine_would_take_apart(
    tmp_path: Path, base: Path, make_adapter: MakeAdapter
) -> None:
    make_adapter(tmp_path / "odd" / "a=b")
    line = command(launch(read_fleet(tmp_path / "odd"), base=str(base), max_ranks=None), "python")
    assert json.loads(line[-1]) == {"lora_name": "a=b", "lora_path": str(tmp_path / "odd" / "a=b")}


def test_an_absent_or_another_engine_is_refused(
    fleet: Path, base: Path, monkeypatch: pytest.MonkeyPatch, launcher: Launcher
) -> None:
    known = importlib.metadata.version

    def answer(name: str) -> str:
        return "0.5.23" if name == "sglang" else known(name)

    monkeypatch.setattr(importlib.metadata, "version", answer)
    code, _, err = launcher.run(fleet, "--base", base)
    assert (code, "sglang 0.5.23 is not a version" in err) == (7, True)
    monkeypatch.setattr(importlib.metadata, "version", _absent)
    assert "SGLang is not installed; pip install 'loraforge[sglang]'" in launcher.run(fleet)[2]
    monkeypatch.setenv(SWITCH, "0")
    assert "SGLang is not installed" in launcher.run(fleet, "--base", base)[2]


def test_an_environment_that_does_not_load_the_plugin_is_refused(
    fleet: Path, base: Path, monkeypatch: pytest.MonkeyPatch, launcher: Launcher
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.5.22")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    assert "does not find its plugin" in launcher.run(fleet, "--base", base)[2]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: (_POINT,))
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    assert "SGLANG_PLUGINS is 'other'" in launcher.run(fleet, "--base", base)[2]


@pytest.mark.engines
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_the_engine_takes_the_line(
    fleet: Path, base: Path, monkeypatch: pytest.MonkeyPatch, launcher: Launcher
) -> None:
    from loraforge.runtime.sglang.command_line import extend

    line = launcher.dry(fleet, "--base", base)
    for variable in (POOL_BYTES, RANKS):  # where the flags are kept
        monkeypatch.setenv(variable, "")
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    if "loraforge" not in next(action for action in parser._actions if action.dest == "lora_backend").choices:
        extend(parser, None)
    arguments = parser.parse_args(line[3:])
    assert (arguments.lora_backend, arguments.max_loras_per_batch, arguments.max_lora_rank) == (
        "loraforge",
        3,
        9,
    )
    assert len(arguments.lora_paths) == 2
