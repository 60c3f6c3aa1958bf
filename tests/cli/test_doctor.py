"""``loraforge doctor`` reports this machine truly, and runs where only the core is installed."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from loraforge.doctor import STAGES, check_packages, examine, requirements, satisfies


@pytest.mark.parametrize(
    ("version", "spec", "serves"),
    [
        ("2.13.0+cpu", ">=2.6", True),
        ("2.6", ">=2.6.0", True),
        ("0.9.1", ">=0.10", False),
        ("0.4.13", "==0.4.13", True),
        ("0.4.14", "==0.4.13", False),
        ("1.5", ">=1.2,==1.5", True),
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
    assert [stage["stage"] for stage in report["stages"]] == list(STAGES)
    assert report["stages"][0]["ok"]  # these tests run on the core


def test_the_serving_engine_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(name: str) -> str:
        if name == "vllm":
            return "0.1.0"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", answer)
    found = examine(tmp_path)["engines"]["vllm"]
    assert (found["distribution"], found["version"]) == ("vllm", "0.1.0")
    assert found["problem"].startswith("vllm 0.1.0 is not a version that the plugin was tested with")


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
