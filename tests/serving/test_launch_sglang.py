"""The command line that serves a fleet in SGLang, and that the launcher never starts an engine without the plugin."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from adapter_folders import SEVEN, MakeAdapter

from loraforge.cli import main
from loraforge.errors import UsageError
from loraforge.runtime.sglang import SWITCH, version
from loraforge.serving.engines import SGLANG_SERVER
from loraforge.serving.launch import launch, read_fleet
from loraforge.serving.launch_sglang import command

_POINT = importlib.metadata.EntryPoint("loraforge", "loraforge.runtime.sglang:register", version.PLUGINS)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    return tmp_path / "base"


@pytest.fixture
def fleet(tmp_path: Path, make_adapter: MakeAdapter) -> Path:
    make_adapter(tmp_path / "fleet" / "all", r=9, targets=SEVEN, lora_alpha=8)
    make_adapter(tmp_path / "fleet" / "few", r=4, seed=1, rank_pattern={"v_proj": 6})
    return tmp_path / "fleet"


def _value(line: Sequence[str], name: str) -> str:
    return line[line.index(name) + 1]


def _run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "sglang", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def _dry(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    assert _run("--dry-run", *arguments) == 0
    return shlex.split(capsys.readouterr().out)


def test_a_folder_of_adapters(fleet: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = _dry(capsys, fleet, "--base", base, "--", "--tp-size", "2")
    assert line[1:3] == ["-m", SGLANG_SERVER]
    assert _value(line, "--model-path") == str(base)
    assert _value(line, "--lora-backend") == "loraforge"
    assert _value(line, "--max-loras-per-batch") == "3"  # the base model takes one
    assert _value(line, "--max-lora-rank") == "9"  # any number, unlike vLLM's
    assert json.loads(_value(line, "--loraforge-ranks"))["qkv_proj"] == 8  # the mean of 9 and 6, up
    needs = sum(item.pool_bytes(torch.bfloat16) for item in read_fleet(fleet))
    assert _value(line, "--loraforge-pool-bytes") == str(needs)
    first = line.index("--lora-paths") + 1
    assert line[first:] == [f"all={fleet / 'all'}", f"few={fleet / 'few'}", "--tp-size", "2"]


def test_slots_of_adapters_and_the_pool_that_they_need(
    fleet: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = _dry(capsys, fleet, "--base", base, "--slots", "1")
    assert _value(line, "--max-loras-per-batch") == "2"
    # a batch of two adapters and no base model pushes the base model out of its slot
    whole = _dry(capsys, fleet, "--base", base)
    assert _value(line, "--loraforge-pool-bytes") == _value(whole, "--loraforge-pool-bytes")


def test_without_the_plugin_the_engine_gets_none_of_its_options(
    fleet: Path, base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SWITCH, "0")
    line = _dry(capsys, fleet, "--base", base)
    assert not any("loraforge" in argument for argument in line[3:] if argument.startswith("--"))
    assert "--lora-backend" not in line


@pytest.mark.parametrize("name", ["--model-path", "--port", "--lora-paths"])
def test_what_the_launcher_decides_is_not_given_twice(fleet: Path, base: Path, name: str) -> None:
    decided = launch(read_fleet(fleet), base=str(base), max_ranks=None)
    with pytest.raises(UsageError, match=f"{name}: is decided by loraforge serve sglang"):
        command(decided, "python", [f"{name}=x"])


def test_names_that_the_engine_would_take_apart(
    tmp_path: Path, base: Path, make_adapter: MakeAdapter
) -> None:
    make_adapter(tmp_path / "odd" / "a=b")
    line = command(launch(read_fleet(tmp_path / "odd"), base=str(base), max_ranks=None), "python")
    assert json.loads(line[-1]) == {"lora_name": "a=b", "lora_path": str(tmp_path / "odd" / "a=b")}


def test_an_absent_or_another_engine_is_refused(
    fleet: Path, base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = importlib.metadata.version

    def answer(name: str) -> str:
        return "0.5.23" if name == "sglang" else known(name)

    monkeypatch.setattr(importlib.metadata, "version", answer)
    assert _run(fleet, "--base", base) != 0
    assert "sglang 0.5.23 is not a version" in capsys.readouterr().err


def test_an_environment_that_does_not_load_the_plugin_is_refused(
    fleet: Path, base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.5.22")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    assert _run(fleet, "--base", base) != 0
    assert "does not find its plugin" in capsys.readouterr().err
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: (_POINT,))
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    assert _run(fleet, "--base", base) != 0
    assert "SGLANG_PLUGINS is 'other'" in capsys.readouterr().err


@pytest.mark.engines
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_the_engine_takes_the_line(
    fleet: Path, base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from loraforge.runtime.sglang.command_line import extend
    from loraforge.runtime.sglang.options import POOL_BYTES, RANKS

    for variable in (POOL_BYTES, RANKS):  # where the flags are kept
        monkeypatch.setenv(variable, "")

    line = _dry(capsys, fleet, "--base", base)
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
