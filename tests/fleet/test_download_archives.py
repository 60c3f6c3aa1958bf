"""Archives that strangers made: files are read out of whole ones, and every other is refused by one error, cheaply."""

from __future__ import annotations

import io
import random
import stat
import tarfile
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from loraforge.errors import InputError
from loraforge.fleet.download.archive import MAX_MEMBERS, folder_of, is_archive, open_archive

CONFIG = "adapter_config.json"
FILES = {"fleet/a/adapter_config.json": b"{}", "fleet/a/weights": random.Random(1).randbytes(3000)}
KINDS = ("tar", "tar.gz", "tgz", "tar.bz2", "tar.xz", "zip")


def write(path: Path, files: dict[str, bytes], kind: str = "tar") -> Path:
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("fleet/", b"")
            for name, data in files.items():
                archive.writestr(name, data)
        return path
    mode = {"tar": "w:", "tar.gz": "w:gz", "tgz": "w:gz", "tar.bz2": "w:bz2", "tar.xz": "w:xz"}[kind]
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        folder = tarfile.TarInfo("./fleet")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def with_member(path: Path, name: str, change: Callable[[tarfile.TarInfo], object]) -> Path:
    with tarfile.open(path, "w:") as tar:
        member = tarfile.TarInfo(name)
        change(member)
        tar.addfile(member)
    return path


def read_all(path: Path, kind: str) -> None:
    with open_archive(path, kind) as archive:
        for name, size in archive.sizes.items():
            assert sum(map(len, archive.pieces(name))) == size


def refused(path: Path, kind: str = "https://x/x.tar") -> str:
    """What opening says of an archive, and reading all of it."""
    with pytest.raises(InputError) as caught:
        read_all(path, kind)
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_files_come_out_whole(tmp_path: Path, kind: str) -> None:
    address = f"https://example.com/x.{kind.upper()}?download=1"
    assert is_archive(address)
    with open_archive(write(tmp_path / "x", FILES, kind), address) as archive:
        assert archive.sizes == {name: len(data) for name, data in FILES.items()}
        assert {name: b"".join(archive.pieces(name)) for name in FILES} == FILES
        assert folder_of(archive, None, CONFIG) == "fleet/a"
    assert not is_archive("https://example.com/x.tar.gz/folder")


def test_which_adapter(tmp_path: Path) -> None:
    two = {"a/adapter_config.json": b"{}", "b/adapter_config.json": b"{}"}
    with open_archive(write(tmp_path / "two", two), "https://x/x.tar") as archive:
        assert folder_of(archive, "b", CONFIG) == "b"
        with pytest.raises(InputError, match=r"holds several adapters \(a, b\); name one with `folder:`"):
            folder_of(archive, None, CONFIG)
    with (
        open_archive(write(tmp_path / "none", {"x": b"x"}), "https://x/x.tar") as archive,
        pytest.raises(InputError, match=r"holds no adapter_config\.json"),
    ):
        folder_of(archive, None, CONFIG)
    with open_archive(write(tmp_path / "root", {CONFIG: b"{}"} | two), "https://x/x.tar") as archive:
        assert folder_of(archive, None, CONFIG) is None


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../../x", "a\\..\\x", "a/\x1b[2J", "..", "a/" + "x" * 300]
)
@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_names_that_lead_out(tmp_path: Path, name: str, kind: str) -> None:
    assert "is a name that leads out of the archive, or is none" in refused(
        write(tmp_path / "x", {name: b"x"}, kind), f"https://x/x.{kind}"
    )


def test_links_and_devices(tmp_path: Path) -> None:
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.GNUTYPE_SPARSE):

        def change(member: tarfile.TarInfo, kind: bytes = kind) -> None:
            member.type, member.linkname = kind, "/etc/passwd"

        assert "is no plain file" in refused(with_member(tmp_path / "x", "a", change))
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        link = zipfile.ZipInfo("a")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    assert "is no plain file" in refused(tmp_path / "x.zip", "https://x/x.zip")


def test_names_twice(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w:") as tar:
        tar.addfile(tarfile.TarInfo("a/b"))
        tar.addfile(tarfile.TarInfo("./a//b"))
    assert "is there twice" in refused(tmp_path / "x.tar")


def test_bombs_are_cheap(tmp_path: Path) -> None:
    zeros = write(tmp_path / "zeros", {"a": bytes(40 << 20)}, "zip")
    gzipped = write(tmp_path / "gzipped", {"a": bytes(40 << 20)}, "tar.gz")
    claims = with_member(tmp_path / "claims", "a", lambda member: setattr(member, "size", 1 << 60))

    def header(member: tarfile.TarInfo) -> None:
        member.type, member.size = tarfile.XHDTYPE, 7 << 30

    header_bomb = with_member(tmp_path / "header", "a", header)
    header_bomb.write_bytes(header_bomb.read_bytes()[:512] + bytes(1 << 21))
    started = time.perf_counter()
    tracemalloc.start()
    assert "claims to be more than 100 times its size" in refused(zeros, "https://x/x.zip")
    assert "claims to be more than 100 times its size" in refused(gzipped, "https://x/x.tar.gz")
    assert "claims to be more than 100 times its size" in refused(claims)
    assert "a header states an absurd length" in refused(header_bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.perf_counter() - started < 10
    assert peak < 8 << 20


def test_too_many_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraforge.fleet.download.archive.MAX_MEMBERS", 3)
    assert MAX_MEMBERS == 100_000
    with tarfile.open(tmp_path / "x.tar", "w:") as tar:
        for i in range(4):
            folder = tarfile.TarInfo(f"f{i}")
            folder.type = tarfile.DIRTYPE
            tar.addfile(folder)
    assert "holds more than 3 files and folders" in refused(tmp_path / "x.tar")


def test_encrypted_and_no_archive(tmp_path: Path) -> None:
    path = write(tmp_path / "x.zip", FILES, "zip")
    data = bytearray(path.read_bytes())
    data[data.rindex(b"PK\1\2") + 8] |= 1  # the flag of the last file in the table of contents
    path.write_bytes(data)
    assert "fleet/a/weights: is encrypted" in refused(path, "https://x/x.zip")
    nameless = zipfile.ZipInfo("a")
    nameless.filename = ""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(nameless, b"x")
    assert "not a whole archive" in refused(path, "https://x/x.zip")
    for kind in ("https://x/x.zip", "https://x/x.tar", "https://x/x.tar.gz"):
        path.write_bytes(b"<html>not found</html>" * 50)
        assert "not a whole archive" in refused(path, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_archives_give_one_error_or_what_they_state(tmp_path: Path, kind: str) -> None:
    whole = write(tmp_path / "whole", FILES, kind).read_bytes()
    draw = random.Random(kind)
    for _ in range(120):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(data))
            match draw.randrange(3):
                case 0:
                    data[place] ^= 1 << draw.randrange(8)
                case 1:
                    del data[place : place + draw.randint(1, 600)]
                case _:
                    data[place:place] = draw.randbytes(draw.randint(1, 600))
            if not data:
                break
        (tmp_path / "x").write_bytes(data)
        try:
            read_all(tmp_path / "x", f"https://x/x.{kind}")
        except InputError as error:
            message = str(error)
            assert message.isprintable()
