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
    monkeypatch.setattr(jit, "PREBUILT_FOLDER", tmp_path / "package")


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
    assert jit.find_library("factor", tmp_path / "k") is None
    with ThreadPoolExecutor(4) as pool:
        paths = {
            future.result() for future in [pool.submit(jit.build, "factor", tmp_path / "k") for _ in range(4)]
        }
    assert len(paths) == 1
    assert len(builds.read_text().splitlines()) == 1
    (path,) = paths
    assert "arch=compute_90,code=sm_90" in path.read_text()
    assert all(unit.name in path.read_text() for unit in jit.sources() if unit.suffix == ".cu")
    assert jit.find_library("factor", tmp_path / "k") == path
    assert sorted(p.name for p in (tmp_path / "k").iterdir()) == ["build.lock", path.name]


def test_another_compiler_or_source_is_another_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(tmp_path / "bin", monkeypatch)
    first = jit.build("factor", tmp_path / "k")
    compiler(tmp_path / "bin", monkeypatch, version="2.0")
    assert jit.build("factor", tmp_path / "k") != first
    copy = tmp_path / "kernels"
    copy.mkdir()
    (copy / "one.cu").write_text("int x;")
    found = jit.find_compiler()
    assert found is not None
    before = jit.library_key(found, "factor", copy)
    (copy / "one.cu").write_text("int y;")
    jit.source_hash.cache_clear()
    assert jit.library_key(found, "factor", copy) != before


def test_a_failing_build_leaves_nothing_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path / "bin", monkeypatch, body='echo "a.cu(3): error: no such thing" >&2; exit 2')
    with pytest.raises(LoraForgeError, match="no such thing"):
        jit.build("factor", tmp_path / "k")
    assert [p.name for p in (tmp_path / "k").iterdir()] == ["build.lock"]


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(jit, "_COMPILERS", {"nvcc": ()})
    with pytest.raises(MissingDependencyError, match="nvcc is not found"):
        jit.build("factor", tmp_path / "k")
    assert jit.state("factor", tmp_path / "k")["built"] is False


def test_a_library_built_ahead_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path / "bin", monkeypatch)
    library, serving = jit.build_ahead()
    assert [path.name for path in (library, serving)] == ["libloraforge_factor.so", "libloraforge_lora.so"]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(jit, "_COMPILERS", {"nvcc": ()})
    assert jit.build("factor", tmp_path / "k") == library
    assert jit.build("lora", tmp_path / "k") == serving
    record = read_json(library.with_suffix(".json"))
    write_json(library.with_suffix(".json"), record | {"sources": "0" * 64})
    assert jit.find_library("factor", tmp_path / "k") is None
    write_json(library.with_suffix(".json"), record)
    library.write_text("damaged")
    assert jit.find_library("factor", tmp_path / "k") is None


def test_the_package_holds_the_sources_of_both_libraries() -> None:
    names = {path.relative_to(jit.KERNELS).as_posix() for path in jit.sources("factor")}
    assert {"csrc/gram.cu", "csrc/tsqr.cu", "csrc/apply.cu", "include/loraforge/portable.cuh"} <= names
    serving = {path.relative_to(jit.KERNELS).as_posix() for path in jit.sources("lora")}
    assert {"csrc/lora/plan.cu", "include/loraforge/lora/plan.cuh"} <= serving
    assert names & serving == {"include/loraforge/portable.cuh"}


@pytest.mark.parametrize(
    ("edited", "changed"),
    [
        ("csrc/one.cu", {"factor"}),
        ("csrc/lora/two.cu", {"lora"}),
        ("include/loraforge/lora/two.cuh", {"lora"}),
        ("include/loraforge/portable.cuh", {"factor", "lora"}),
    ],
)
def test_an_edit_changes_the_libraries_that_include_it(
    tmp_path: Path, edited: str, changed: set[str]
) -> None:
    for name in ("csrc/one.cu", "csrc/lora/two.cu", "include/loraforge/lora/two.cuh"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("int x;")
    (tmp_path / "include/loraforge/portable.cuh").write_text("int x;")
    before = {library: jit.source_hash(library, tmp_path) for library in jit.LIBRARIES}
    (tmp_path / edited).write_text("int y;")
    jit.source_hash.cache_clear()
    after = {library: jit.source_hash(library, tmp_path) for library in jit.LIBRARIES}
    assert {library for library in jit.LIBRARIES if before[library] != after[library]} == changed
