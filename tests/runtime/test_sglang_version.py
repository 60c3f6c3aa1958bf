"""Which SGLang the plugin takes, and that a server which asks for it never starts without it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loraforge.errors import MissingDependencyError, UsageError
from loraforge.runtime import sglang
from loraforge.runtime.sglang import version
from loraforge.runtime.sglang.options import Options

installed = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
ROOT = Path(__file__).parents[2]


def _install(monkeypatch: pytest.MonkeyPatch, number: str | None) -> None:
    """Have the metadata of this environment name this version of SGLang."""

    def answer(name: str) -> str:
        if number is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return number

    monkeypatch.setattr(importlib.metadata, "version", answer)


def test_the_version_that_the_plugin_was_written_for(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, "0.5.22+cu130")
    assert version.require() == "0.5.22+cu130"


@pytest.mark.parametrize("number", ["0.5.23", "0.5.21", "0.5.22.post1", "0.6.0"])
def test_others_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    _install(monkeypatch, number)
    with pytest.raises(MissingDependencyError, match=rf"sglang {number} is not a version .*\(0.5.22\)"):
        version.require()


def test_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, None)
    with pytest.raises(MissingDependencyError, match=r"not installed; pip install 'loraforge\[sglang\]'"):
        version.require()


def test_the_switch_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sglang.SWITCH, "0")
    sglang.register()  # with no engine here, anything else would fail


def test_a_switch_that_means_nothing_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sglang.SWITCH, "on")
    with pytest.raises(SystemExit, match=r"LORAFORGE_SGLANG: 'on'; give 1, 0 or native"):
        sglang.register()


def test_the_entry_point_is_this_function() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert (
        f'[project.entry-points."{version.PLUGINS}"]\nloraforge = "loraforge.runtime.sglang:register"' in text
    )
    assert f'sglang = ["sglang=={version.SUPPORTED[0]}"]' in text


def test_options() -> None:
    assert Options.of({}) == Options("ragged", None, {})
    assert Options.of(
        {
            "LORAFORGE_POOL": "shadow",
            "LORAFORGE_POOL_BYTES": "4096",
            "LORAFORGE_RANKS": '{"qkv_proj": 4}',
        }
    ) == Options("shadow", 4096, {"qkv_proj": 4})


@pytest.mark.parametrize(
    "given",
    [
        {"LORAFORGE_POOL": "big"},
        {"LORAFORGE_POOL_BYTES": "0"},
        {"LORAFORGE_POOL_BYTES": "4GiB"},
        {"LORAFORGE_RANKS": "4"},
        {"LORAFORGE_RANKS": "{"},
        {"LORAFORGE_RANKS": '{"qkv_proj": 0}'},
    ],
)
def test_options_that_mean_nothing(given: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=next(iter(given))):
        Options.of(given)


_PARSE = """
import argparse, sys
from importlib import metadata
if number := {number!r}:
    known = metadata.version
    metadata.version = lambda name: number if name == "sglang" else known(name)
if {plugin}:
    import loraforge.runtime.sglang
    loraforge.runtime.sglang.register()
from sglang.srt.plugins.hook_registry import HookRegistry
HookRegistry.apply_hooks()
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
arguments = parser.parse_args(["--model-path", "m", "--lora-backend", "loraforge", *{flags}])
from sglang.srt.lora.backend.lora_registry import get_backend_from_name
import os
print(arguments.lora_backend, get_backend_from_name("loraforge").name, os.environ.get("LORAFORGE_POOL_BYTES"))
"""


def _parse(
    *, plugin: bool = True, number: str | None = None, flags: tuple[str, ...] = (), switch: str = "1"
) -> subprocess.CompletedProcess[str]:
    """What a server's command line makes of ``--lora-backend loraforge``."""
    return subprocess.run(
        [sys.executable, "-c", _PARSE.format(plugin=plugin, number=number, flags=list(flags))],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), sglang.SWITCH: switch},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.engines
@installed
def test_the_command_line_takes_the_backend_and_the_flags() -> None:
    done = _parse(flags=("--loraforge-pool-bytes", "123456"))
    assert done.stdout.split() == ["loraforge", "loraforge", "123456"], done.stderr[-2000:]


@pytest.mark.engines
@installed
def test_native_execution_under_the_same_command_line() -> None:
    assert _parse(switch="native").stdout.split() == ["loraforge", "csgmv", "None"]


@pytest.mark.engines
@installed
def test_without_the_plugin_the_command_line_is_refused() -> None:
    done = _parse(plugin=False)
    assert done.returncode == 2
    assert "invalid choice: 'loraforge'" in done.stderr


@pytest.mark.engines
@installed
def test_another_version_refuses_the_command_line_with_the_reason() -> None:
    done = _parse(number="0.5.23")
    assert done.returncode == 2
    assert "sglang 0.5.23 is not a version that the plugin was written for (0.5.22)" in done.stderr
