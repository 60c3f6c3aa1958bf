"""Building and finding the kernels, with a compiler that is a shell script: no GPU toolkit is needed."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loraforge import jit
from loraforge.errors import LoraForgeError, MissingDependencyError
from loraforge.files import read_json, write_json


@pytest.fixture(autouse=True)
def no_library_in_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(jit, "PREBUILT", tmp_path / "package" / "lib.so")


def compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, *, version: str = "1.0", body: str = "") -> Path:
    """An nvcc that notes each build in ``builds`` and writes its arguments to the file after -o."""
    folder.mkdir(exist_ok=True)
    script = folder / "nvcc"
    script.write_text(
        f"""#!/bin/bash
if [ "$1" = --version ]; then echo "release {version}"; exit 0; fi
echo "$@" >> "{folder}/builds"
{body}
args="$*"
while [ "$1" != -o ]; do shift; done
sleep 0.2
echo "$args" > "$2"
"""
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder / "builds"


def test_a_build_happens_once_whoever_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = compiler(tmp_path / "bin", monkeypatch)
    assert jit.find_library(tmp_path / "k") is None
    with ThreadPoolExecutor(4) as pool:
        paths = {future.result() for future in [pool.submit(jit.build, tmp_path / "k") for _ in range(4)]}
    assert len(paths) == 1
    assert len(builds.read_text().splitlines()) == 1
    (path,) = paths
    assert "arch=compute_90,code=sm_90" in path.read_text()
    assert all(unit.name in path.read_text() for unit in jit.sources() if unit.suffix == ".cu")
    assert jit.find_library(tmp_path / "k") == path
    assert sorted(p.name for p in (tmp_path / "k").iterdir()) == ["build.lock", path.name]


def test_another_compiler_or_source_is_another_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(tmp_path / "bin", monkeypatch)
    first = jit.build(tmp_path / "k")
    compiler(tmp_path / "bin", monkeypatch, version="2.0")
    assert jit.build(tmp_path / "k") != first
    copy = tmp_path / "kernels"
    copy.mkdir()
    (copy / "one.cu").write_text("int x;")
    found = jit.find_compiler()
    assert found is not None
    before = jit.library_key(found, copy)
    (copy / "one.cu").write_text("int y;")
    jit.source_hash.cache_clear()
    assert jit.library_key(found, copy) != before


def test_a_failing_build_leaves_nothing_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path / "bin", monkeypatch, body='echo "a.cu(3): error: no such thing" >&2; exit 2')
    with pytest.raises(LoraForgeError, match="no such thing"):
        jit.build(tmp_path / "k")
    assert [p.name for p in (tmp_path / "k").iterdir()] == ["build.lock"]


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(jit, "_COMPILERS", {"nvcc": ()})
    with pytest.raises(MissingDependencyError, match="nvcc is not found"):
        jit.build(tmp_path / "k")
    assert jit.state(tmp_path / "k")["built"] is False


def test_a_library_built_ahead_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path / "bin", monkeypatch)
    library = jit.build_ahead()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(jit, "_COMPILERS", {"nvcc": ()})
    assert jit.build(tmp_path / "k") == library
    record = read_json(library.with_suffix(".json"))
    write_json(library.with_suffix(".json"), record | {"sources": "0" * 64})
    assert jit.find_library(tmp_path / "k") is None
    write_json(library.with_suffix(".json"), record)
    library.write_text("damaged")
    assert jit.find_library(tmp_path / "k") is None


def test_the_package_holds_the_sources() -> None:
    names = {path.relative_to(jit.KERNELS).as_posix() for path in jit.sources()}
    assert {"csrc/gram.cu", "csrc/tsqr.cu", "csrc/apply.cu", "include/loraforge/portable.cuh"} <= names
