"""A file under way: its bytes, a journal of the segments that have come, and a lock against other processes.

The journal is written after the bytes. A process that is killed therefore leaves no segment marked that it has not
written, and the next one goes on where it was; what the disk may lose in a power cut, the hash of the whole shows.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from loraforge.errors import OutputError
from loraforge.files import output_error

SEGMENT = 1 << 20
STALE_S = 7 * 24 * 3600.0
_CHUNK = 1 << 20


class Part:
    """A file of ``size`` bytes under way at ``path``; made by :func:`hold`. Threads may write to it at once."""

    def __init__(self, path: Path, handle: int, size: int) -> None:
        self.path, self.size, self._handle = path, size, handle
        self._journal = path.with_suffix(".segments")
        self._count = -(-size // SEGMENT)
        if os.fstat(handle).st_size != size:  # new, or of another plan
            self._journal.unlink(missing_ok=True)
            if size > shutil.disk_usage(path.parent).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(handle, size)
        self._log = os.open(self._journal, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._done = self._read_journal()

    def close(self) -> None:
        os.close(self._log)
        os.close(self._handle)

    @property
    def begun(self) -> bool:
        """Whether a later process would have something to go on from."""
        return bool(self._done)

    def missing(self) -> list[tuple[int, int]]:
        """Runs of bytes that have not come, as (start, stop), in order."""
        runs: list[tuple[int, int]] = []
        for index in range(self._count):
            if index in self._done:
                continue
            start, stop = index * SEGMENT, min(self.size, (index + 1) * SEGMENT)
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], stop)
            else:
                runs.append((start, stop))
        return runs

    def write(self, offset: int, data: bytes) -> None:
        """Put bytes in their place. Raises OutputError."""
        try:
            view = memoryview(data)
            while view:
                written = os.pwrite(self._handle, view, offset)
                offset, view = offset + written, view[written:]
        except OSError as error:
            raise output_error(error, self.path) from error

    def arrived(self, before: int, now: int) -> None:
        """Mark the segments that a stream has completed by coming from ``before`` to ``now``; it began at one."""
        end = self._count if now == self.size else now // SEGMENT
        if new := [index for index in range(before // SEGMENT, end) if index not in self._done]:
            try:
                os.write(self._log, "".join(f"{index}\n" for index in new).encode())
            except OSError as error:
                raise output_error(error, self._journal) from error
            self._done.update(new)

    def hash(self, kind: Literal["sha256", "git"]) -> str:
        """Hex SHA-256 of the bytes, or the SHA-1 that git gives a file of them."""
        digest = hashlib.sha256() if kind == "sha256" else hashlib.sha1(usedforsecurity=False)
        if kind == "git":
            digest.update(b"blob %d\0" % self.size)
        offset = 0
        while piece := os.pread(self._handle, _CHUNK, offset):
            digest.update(piece)
            offset += len(piece)
        return digest.hexdigest()

    def finish(self, place: Path) -> None:
        """Move the whole file to ``place``, read-only. Raises OutputError."""
        try:
            os.fsync(self._handle)
            os.fchmod(self._handle, os.fstat(self._handle).st_mode & 0o444)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(self.path, place)
        except OSError as error:
            raise output_error(error, place) from error
        self._journal.unlink(missing_ok=True)

    def drop(self) -> None:
        """Leave nothing of it."""
        self._journal.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def _read_journal(self) -> set[int]:
        """Segments that have come. A line without its end was not written whole, and goes."""
        whole = os.pread(self._log, os.fstat(self._log).st_size, 0).rpartition(b"\n")
        os.ftruncate(self._log, len(whole[0]) + len(whole[1]))
        lines = whole[0].split()
        return {int(line) for line in lines if line.isdigit() and int(line) < self._count}


@contextmanager
def hold(path: Path, size: int) -> Iterator[Part | None]:
    """The part at ``path``, which is made if need be; None where another process, or thread, has it.

    Raises OutputError where it cannot be made, and on file systems without locks.
    """
    handle = _locked(path)
    if handle is None:
        yield None
        return
    try:
        part = Part(path, handle, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        os.close(handle)
        raise output_error(error, path) from error
    try:
        yield part
    finally:
        part.close()


def sweep(folder: Path) -> None:
    """Remove parts that nobody has gone on with for a week."""
    for path in folder.glob("*.part"):
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - STALE_S and (handle := _locked(path)) is not None:
                try:
                    path.with_suffix(".segments").unlink(missing_ok=True)
                    path.unlink()
                finally:
                    os.close(handle)


def _locked(path: Path) -> int | None:
    """A descriptor of the file at ``path`` that holds its lock; None where another does."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise output_error(error, path) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            same = os.path.samestat(os.fstat(handle), os.stat(path))
        except BlockingIOError:
            os.close(handle)
            return None
        except FileNotFoundError:  # finished by another in this moment
            same = False
        except OSError as error:
            os.close(handle)
            raise OutputError(
                f"cannot be locked ({error.strerror})",
                path=path,
                remedy="set LORAFORGE_STORE to a folder on a file system with locks",
            ) from error
        if same:
            return handle
        os.close(handle)
