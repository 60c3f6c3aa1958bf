"""Archives of adapters, which strangers made: files are read out of them by name, nothing is ever unpacked to a path.

An archive that holds a link, a device, or a name that leads out of it is refused as a whole, as is one that claims to
be many times its size.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, cast
from urllib.parse import urlsplit

from loraforge.errors import InputError
from loraforge.fleet.download.address import shown_url
from loraforge.fleet.untrusted_json import shown
from loraforge.fleet.untrusted_path import plain_name

SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
MAX_MEMBERS = 100_000
MAX_RATIO = (
    100  # factors hardly compress at all; all zeros would, and only a stranger who means harm sends those
)
_MAX_HEADER = 1 << 20
_CHUNK = 1 << 20


def is_archive(url: str) -> bool:
    """Whether an address is that of an archive, by its name."""
    return urlsplit(url).path.lower().endswith(SUFFIXES)


class Archive:
    """An opened archive: ``sizes`` of its files by name."""

    def __init__(self, shown: str, sizes: dict[str, int], read: Callable[[str], IO[bytes]]) -> None:
        self.shown, self.sizes, self._read = shown, sizes, read

    def pieces(self, name: str) -> Iterator[bytes]:
        """The content of a file, as many bytes as :attr:`sizes` states. Raises InputError where it is damaged."""
        left = self.sizes[name]
        with _damage_told(self.shown), self._read(name) as stream:
            while left:
                piece = stream.read(min(left, _CHUNK))
                if not piece:
                    raise EOFError(f"{name} ends early")
                left -= len(piece)
                yield piece
            stream.read(1)  # a zip checks its sum at the end


@contextmanager
def open_archive(path: Path, address: str) -> Iterator[Archive]:
    """Open the archive at ``path``, which came from ``address``: that tells a zip from a tar.

    Raises InputError for what is damaged, or no archive, or holds what none of adapters should.
    """
    with ExitStack() as stack:
        with _damage_told(shown_url(address)):
            opener = _open_zip if urlsplit(address).path.lower().endswith(".zip") else _open_tar
            archive = opener(path, _Sizes(shown_url(address), path.stat().st_size), stack)
        yield archive


def _open_zip(path: Path, sizes: _Sizes, stack: ExitStack) -> Archive:
    opened = stack.enter_context(zipfile.ZipFile(path))
    members: dict[str, zipfile.ZipInfo] = {}
    for member in opened.infolist():
        mode = member.external_attr >> 16
        if member.is_dir():
            sizes.check_name(member.filename)
            continue
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
            raise _refused(sizes.shown, member.filename, "is no plain file")
        if member.flag_bits & 1:
            raise _refused(sizes.shown, member.filename, "is encrypted")
        members[sizes.add(member.filename, member.file_size)] = member
    return Archive(sizes.shown, sizes.found, lambda name: opened.open(members[name]))


def _open_tar(path: Path, sizes: _Sizes, stack: ExitStack) -> Archive:
    raw = stack.enter_context(path.open("rb"))
    magic = raw.read(6)
    raw.seek(0)
    plain: IO[bytes] = raw
    for start, opener in ((b"\x1f\x8b", gzip.open), (b"BZh", bz2.open), (b"\xfd7zXZ\0", lzma.open)):
        if magic.startswith(start):
            plain = stack.enter_context(cast(IO[bytes], opener(raw)))
    opened = stack.enter_context(tarfile.TarFile(fileobj=cast(IO[bytes], _Bounded(plain)), mode="r"))
    members: dict[str, tarfile.TarInfo] = {}
    for member in opened:
        if member.isdir():
            sizes.check_name(member.name)
            continue
        if not member.isreg() or member.issparse():
            raise _refused(sizes.shown, member.name, "is no plain file")
        members[sizes.add(member.name, member.size)] = member
    return Archive(sizes.shown, sizes.found, lambda name: _extracted(opened, members[name]))


def _extracted(opened: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    stream = opened.extractfile(member)
    assert stream is not None  # it is a regular file
    return stream


class _Sizes:
    """The files of an archive as they are found, each checked before the next is looked for."""

    def __init__(self, shown: str, size: int) -> None:
        self.shown, self._most = shown, MAX_RATIO * size
        self._total = self._names = 0
        self.found: dict[str, int] = {}

    def add(self, name: str, size: int) -> str:
        clean = self.check_name(name)
        if clean in self.found:
            raise _refused(self.shown, name, "is there twice")
        self.found[clean] = size
        self._total += size
        if self._total > self._most:
            raise InputError(f"claims to be more than {MAX_RATIO} times its size", path=self.shown)
        return clean

    def check_name(self, name: str) -> str:
        self._names += 1
        if self._names > MAX_MEMBERS:
            raise InputError(f"holds more than {MAX_MEMBERS} files and folders", path=self.shown)
        path = PurePosixPath(name)
        if path.is_absolute() or not all(map(plain_name, path.parts)):
            raise _refused(self.shown, name, "is a name that leads out of the archive, or is none")
        return str(path)


class _Bounded:
    """A stream that refuses to read what no header of an archive is: tarfile takes a stated length at its word."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _MAX_HEADER:
            raise tarfile.ReadError("a header states an absurd length")
        return self._stream.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()


@contextmanager
def _damage_told(where: str) -> Iterator[None]:
    try:
        yield
    except (
        tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, OSError,
        NotImplementedError, RuntimeError, ValueError, OverflowError, IndexError,
    ) as error:  # fmt: skip
        said = shown(str(error)) or type(error).__name__
        raise InputError(
            f"not a whole archive ({said})", path=where, remedy="download or make it again"
        ) from error


def _refused(where: str, name: str, why: str) -> InputError:
    return InputError(why, path=where, key=shown(name), remedy="make an archive of plain adapter folders")


def member(folder: str | None, name: str) -> str:
    """The name of a file of an adapter that lies in ``folder`` of an archive."""
    return name if folder is None else f"{folder}/{name}"


def folder_of(archive: Archive, folder: str | None, config: str) -> str | None:
    """Where in an archive the adapter lies: as asked, or where its only ``config`` is.

    Raises InputError where there is none, or several to choose from.
    """
    if folder is not None or config in archive.sizes:
        return folder
    places = sorted(
        str(PurePosixPath(name).parent) for name in archive.sizes if PurePosixPath(name).name == config
    )
    if len(places) != 1:
        found = ", ".join(map(shown, places[:5])) + (", …" if len(places) > 5 else "")
        raise InputError(
            f"holds several adapters ({found})" if places else f"holds no {config}",
            path=archive.shown,
            remedy="name one with `folder:`" if places else "name an archive of adapter folders",
        )
    return places[0]
