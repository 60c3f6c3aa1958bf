"""``loraforge inspect`` shows what the manifest states, and needs no torch for it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from adapter_folders import MakeAdapter

from loraforge.cli import main


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return int(caught.value.code or 0)


@pytest.fixture
def out(tmp_path: Path, make_adapter: MakeAdapter) -> Path:
    for index, rank in enumerate((4, 8)):
        make_adapter(tmp_path / "fleet" / f"adapter{index}", r=rank, seed=index, base="tiny/[base]")
    arguments = (
        tmp_path / "fleet",
        "--budget",
        "1/2",
        "--cache",
        tmp_path / "cache",
        "--out",
        tmp_path / "out",
    )
    assert run("compress", *arguments) == 0
    return tmp_path / "out"


def test_tables(out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    capsys.readouterr()
    assert run("inspect", out, "--worst", 3) == 0
    shown = capsys.readouterr().out
    manifest = json.loads((out / "manifest.json").read_text())
    fleet = manifest["fleet"]
    assert "tiny/[base]: adapter-sqrt at 1/2" in shown
    assert f"{fleet['spent']:,} of {fleet['budget']['params']:,} parameters" in shown
    modules = [
        (module["certificate"]["retained_energy"], name, path, module)
        for name, adapter in manifest["adapters"].items()
        for path, module in adapter["modules"].items()
    ]
    for name, adapter in manifest["adapters"].items():
        row = " ".join(line for line in shown.partition("least retained")[0].splitlines() if name in line)
        ranks = sorted(module["k"] for module in adapter["modules"].values())
        assert f"{ranks[0]} / {(ranks[1] + ranks[2]) / 2:g} / {ranks[-1]}" in row
        assert f"{sum(m['compact_parameters'] for m in adapter['modules'].values()):,} (" in row
        for layout in adapter["layouts"].values():
            assert f"{layout['bytes'] / 1e3:,.1f} kB" in row
    worst = shown.partition("least retained energy")[2]
    listed = [line for line in worst.splitlines() if "model.layers" in line]
    assert len(listed) == 3
    for (energy, name, path, module), line in zip(sorted(modules, key=lambda m: m[:3]), listed, strict=False):
        assert all(text in line for text in (name, path, f"{module['k']} of {module['r']}", f"{energy:.1%}"))


def test_no_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", tmp_path) == 3
    assert (
        capsys.readouterr().err == f"error: {tmp_path / 'manifest.json'}: file not found; "
        "name an output of `loraforge compress`\n"
    )


def test_names_and_budgets_are_shown_as_they_are(
    tmp_path: Path, make_adapter: MakeAdapter, capsys: pytest.CaptureFixture[str]
) -> None:
    make_adapter(tmp_path / "[bold]v1")
    out = tmp_path / "out"
    arguments = ("--bytes", 2000, "--cache", tmp_path / "cache", "--out", out)
    assert run("compress", tmp_path / "[bold]v1", *arguments) == 0
    capsys.readouterr()
    assert run("inspect", out) == 0
    shown = capsys.readouterr().out
    assert "adapter-sqrt at 2000 bytes," in shown
    assert shown.count("  [bold]v1 ") > 1


def test_80_columns(out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    capsys.readouterr()
    assert run("inspect", out) == 0
    shown = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in shown)
    for name in ("adapter0", "adapter1"):  # no number is cut or folded
        assert sum(len(re.findall(r"\(\d+\.\d%\)", line)) for line in shown if name in line) == 3
    assert not any("…" in line for line in shown)


def test_a_full_disk_under_standard_output(out: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "loraforge", "inspect", out],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 5
    assert (
        done.stderr == "error: standard output: no space left on the device; free some space and run again\n"
    )


def test_without_torch(out: Path) -> None:
    code = (
        "import sys\nsys.modules['torch'] = None\nfrom loraforge.cli import main\n"
        f"main(['inspect', {str(out)!r}, '--worst', '0'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "adapter0" in done.stdout
    assert "least retained energy" not in done.stdout
