"""Folders appear whole, and replace nothing that is still needed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from loraforge import files
from loraforge.errors import InputError, OutputError
from loraforge.files import (
    atomic_folder,
    read_json,
    read_jsonl,
    refuse_non_empty,
    refuse_to_replace,
    refuse_unwritable,
    sweep_files,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """An output of an earlier run."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "old").touch()
    return folder


def test_a_link_to_a_folder_stays_a_link(old: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(old)
    with atomic_folder(link, force=True) as temporary:
        (temporary / "new").touch()
    assert link.readlink() == old
    assert names(old) == ["new"]
    assert names(tmp_path) == ["link", "out"]


def test_the_old_folder_comes_back_where_the_new_one_cannot_take_its_place(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = iter([None, OSError("second rename"), None])
    rename = os.replace

    def replace(source: Path, target: Path) -> None:
        if error := next(moves):
            raise error
        rename(source, target)

    monkeypatch.setattr(files.os, "replace", replace)
    with pytest.raises(OutputError, match="second rename"), atomic_folder(old, force=True) as temporary:
        (temporary / "new").touch()
    assert names(old) == ["old"]
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("kept", ["out", "out/cache", "out/deep/adapter"])
def test_what_is_in_use_is_not_replaced(tmp_path: Path, kept: str) -> None:
    with pytest.raises(OutputError, match=r"would replace .*, which is in use here"):
        refuse_to_replace(tmp_path / "out", [tmp_path / "elsewhere", tmp_path / kept])


def test_neither_is_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputError, match="in use"):
        refuse_to_replace(Path("."), [])
    refuse_to_replace(Path("out"), [tmp_path / "out2"])


def test_places_that_cannot_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutputError, match="File name too long"):
        refuse_non_empty(tmp_path / ("z" * 300), force=False)
    with pytest.raises(OutputError, match="File name too long"):
        refuse_unwritable(tmp_path / ("z" * 300))
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    refuse_to_replace(tmp_path / "out", [loop])
    if sys.version_info < (3, 13):  # later ones take a loop for a name
        with pytest.raises(OutputError, match="is a loop of links"):
            refuse_non_empty(loop, force=True)

    def is_dir(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", is_dir)
    with pytest.raises(OutputError, match="out: not writable"):
        refuse_non_empty(tmp_path / "out", force=True)
    with pytest.raises(OutputError, match="out: not writable"):
        refuse_unwritable(tmp_path / "out")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"r": 1' + "0" * 5000 + "}"], ids=["deep", "long"])
def test_json_beyond_what_python_reads(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    for read in (read_json, lambda path: list(read_jsonl(path))):
        with pytest.raises(InputError, match="not JSON that can be read"):
            read(path)


def test_what_another_run_put_there_meanwhile_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def run(name: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        with atomic_folder(out) as temporary:
            (temporary / name).touch()
            meanwhile()

    with pytest.raises(OutputError, match="exists and is not empty"):
        run("slower", lambda: run("faster"))
    assert names(tmp_path) == ["out"]
    assert names(out) == ["faster"]


def test_a_signal_just_after_the_temporary_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path) -> None:
        assert path.is_dir()
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "_lock", interrupted)
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "out"):
        pass
    assert names(tmp_path) == []


def test_what_a_killed_run_left_goes_with_the_next(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom loraforge.files import atomic_folder\n"
        "with atomic_folder(Path(sys.argv[1])) as temporary:\n"
        "    (temporary / 'half').touch()\n    print(temporary, flush=True)\n    sys.stdin.read()\n"
    )
    out = tmp_path / "out"

    def start() -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, out], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        temporary = Path(process.stdout.readline().strip())
        old = time.time() - 3600
        os.utime(temporary, (old, old))
        return process, temporary

    live, kept = start()
    dead, left = start()
    dead.kill()
    dead.wait()
    other = tmp_path / ".out.b.abcdefgh.tmp"  # of another output, out.b
    other.mkdir()
    os.utime(other, (0, 0))
    assert left.is_dir()
    with atomic_folder(out) as temporary:
        (temporary / "whole").touch()
    assert names(tmp_path) == sorted([kept.name, other.name, "out"])
    live.kill()
    live.wait()


@pytest.mark.parametrize("name", ["z" * 255, "é" * 127])
def test_names_as_long_as_the_file_system_takes(tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    files.write_text(out, "file")
    out.unlink()
    for number in (1, 2):
        with atomic_folder(out, force=True) as temporary:
            (temporary / str(number)).touch()
    assert names(out) == ["2"]
    with files.scratch_folder(out) as scratch:
        other = scratch.with_name(scratch.name.replace(".tmp", "")[:-8] + "abcdefgh.tmp")
    other.mkdir()  # as a killed run leaves it
    os.utime(other, (0, 0))
    with atomic_folder(out, force=True):
        pass
    assert names(tmp_path) == [name]


def test_so_do_half_written_files_where_they_are_swept(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom loraforge.files import atomic_path\n"
        "with atomic_path(Path(sys.argv[1])) as temporary:\n"
        "    temporary.write_bytes(b'half')\n    print(temporary, flush=True)\n    sys.stdin.read()\n"
    )
    live, dead = (
        subprocess.Popen(
            [sys.executable, "-c", code, tmp_path / name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("live", "dead")
    )
    for process in (live, dead):
        assert process.stdout is not None
        os.utime(process.stdout.readline().strip(), (0, 0))
    dead.kill()
    dead.wait()
    (tmp_path / "whole").touch()
    assert len(names(tmp_path)) == 3
    sweep_files(tmp_path)
    sweep_files(tmp_path / "nowhere")
    assert [name.partition(".live")[0] for name in names(tmp_path)] == ["", "whole"]
    live.communicate()
    assert names(tmp_path) == ["live", "whole"]
