"""Atomic writes, hashes and canonical JSON: the only ways in which stages put bytes on disk."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from loraforge.errors import InputError, LoraForgeError, OutputError

_CHUNK = 1 << 20
_LONGEST = 128  # bytes of a name that temporary ones repeat, with 14 more: 255 are taken mostly, 143 at least
_STARTED = time.time()  # of this process, nearly
# it can be read by setting it only, which threads that write at once would do to each other
os.umask(_UMASK := os.umask(0))


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file, read in 1 MiB pieces. Raises InputError where it cannot be read."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as stream:
            while piece := stream.read(_CHUNK):
                digest.update(piece)
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", path=path) from error
    return digest.hexdigest()


def sha256_text(text: str) -> str:
    """Hex SHA-256 of UTF-8 text."""
    return hashlib.sha256(text.encode()).hexdigest()


def canonical_json(value: Any) -> str:
    """The one JSON text of a value (sorted keys, no blanks, NaN refused): what hashes are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def pretty_json(value: Any) -> str:
    """JSON for people and diffs: sorted keys, two-space indent, final newline, NaN refused."""
    return json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_json(path: Path) -> Any:
    """Parse a JSON file. Raises InputError that names the file and the line of a syntax error, or the key of a
    text that holds half a character (a lone surrogate), which could be written nowhere."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        value = json.loads(text)
    except FileNotFoundError as error:
        raise InputError("file not found", path=path) from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read ({error})", path=path) from error
    except json.JSONDecodeError as error:
        raise InputError(f"not valid JSON at line {error.lineno}: {error.msg}", path=path) from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # an integer of thousands of digits, nesting of thousands of levels
        raise InputError(f"not JSON that can be read ({error})", path=path) from error
    if re.search(r"\\u[dD][89a-fA-F]", text) and (key := half_character(value)) is not None:
        raise InputError(
            "holds half a character (a lone surrogate)",
            path=path,
            key=key or None,
            remedy="write that text anew",
        )
    return value


def half_character(value: Any, key: str = "") -> str | None:
    """The dotted key of a text in a JSON value that is not valid Unicode (a lone surrogate), or None."""
    if isinstance(value, str):
        return key if any("\ud800" <= character <= "\udfff" for character in value) else None
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        if any(half_character(name) is not None for name in value):
            return key
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    inner = (half_character(item, f"{key}.{name}" if key else str(name)) for name, item in items)
    return next((found for found in inner if found is not None), None)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON Lines file. Raises InputError that names the bad line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read ({error})", path=path) from error
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"not valid JSON at line {number}: {error.msg}", path=path) from error
        except (ValueError, RecursionError) as error:
            raise InputError(f"not JSON that can be read, line {number} ({error})", path=path) from error


def output_error(error: OSError, path: Path) -> LoraForgeError:
    """Translate an operating-system error on writing into the one-line error a user can act on."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutputError("no space left on the device", path=path, remedy="free some space and run again")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return OutputError("not writable", path=path, remedy="choose another output")
    if error.errno == errno.EBUSY:
        return OutputError("is in use as a mount point", path=path, remedy="choose a folder inside it")
    return OutputError(f"cannot be written ({error.strerror or error})", path=path)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Give a temporary name beside ``path``; rename it over ``path`` on success, remove it on failure.

    What a killed run leaves there is for :func:`sweep_files`. Raises OutputError for a full disk, a read-only
    folder or any other failure of the file system.
    """
    path = Path(path)
    temporary: Path | None = None
    lock: int | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f"{_stem(path)}.", suffix=".tmp", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        lock = _lock(temporary)
        yield temporary
        os.chmod(temporary, 0o666 & ~_UMASK)  # mkstemp makes files private; results are not secrets
        with open(temporary, "rb") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise output_error(error, path) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        if lock is not None:
            os.close(lock)


def sweep_files(folder: Path) -> None:
    """Remove the temporary files in ``folder`` that :func:`atomic_path` made for processes that are gone.

    For folders whose writers keep the file that they are given: one that puts another in its place loses the lock.
    """
    if Path(folder).is_dir():
        _sweep(Path(folder), r"\..+", lambda path: path.unlink())


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically (UTF-8, newlines as given)."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write pretty JSON atomically."""
    write_text(path, pretty_json(value))


def write_jsonl(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write one canonical JSON object a line, atomically."""
    write_text(path, "".join(canonical_json(record) + "\n" for record in records))


def write_with(path: Path, writer: Callable[[Path], object]) -> None:
    """Let ``writer`` write to a temporary name, then rename; for libraries that take a path."""
    with atomic_path(path) as temporary:
        writer(temporary)


@contextmanager
def atomic_folder(path: Path, *, force: bool | None = False) -> Iterator[Path]:
    """Give a new temporary folder beside ``path``; put it in place as a whole on success.

    An existing folder that is not empty is refused (OutputError) unless ``force``, None where there is no such
    option; with ``force`` it is replaced only once the new one is complete. Nothing remains of a run that fails;
    what a killed one left beside ``path`` goes with the next.
    """
    path = Path(path)
    place = path.resolve()  # what a link points to is replaced, not the link
    try:
        refuse_non_empty(path, force=force)
        with scratch_folder(place) as temporary:
            os.chmod(temporary, 0o755)
            yield temporary
            refuse_non_empty(path, force=force)  # another run may have been faster
            _put_in_place(temporary, place)
    except OSError as error:
        raise output_error(error, path) from error


@contextmanager
def scratch_folder(place: Path) -> Iterator[Path]:
    """Give a new temporary folder beside ``place``, which goes again; so does, first, what a killed run left there.

    Raises OutputError where none can be made.
    """
    # named here, not by tempfile: a signal may come as soon as the folder is made
    temporary = place.parent / f"{_stem(place)}.{secrets.token_hex(4)}.tmp"
    lock: int | None = None
    try:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            _sweep(place.parent, re.escape(_stem(place)), shutil.rmtree)
            temporary.mkdir(mode=0o700)
            lock = _lock(temporary)
        except OSError as error:
            raise output_error(error, place) from error
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if lock is not None:
            os.close(lock)


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Hold a folder, which is made if need be, against other processes that hold it so; freed by this one's death too.

    Raises OutputError where one does, or where the folder cannot be made.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise output_error(error, folder) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise OutputError(
            "another run writes there", path=folder, remedy="wait for its end, or choose another folder"
        ) from error
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(handle)


def _stem(path: Path) -> str:
    """What temporary names of ``path`` begin with: its name, or where a file system may not take more, a hash of it."""
    name = os.fsencode(path.name)
    return f".{path.name if len(name) <= _LONGEST else hashlib.sha256(name).hexdigest()}"


def _lock(path: Path) -> int | None:
    """Lock a file or folder until the descriptor is closed, by its process's death too; None where it is locked
    already, or where the file system has no locks."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _sweep(parent: Path, stem: str, remove: Callable[[Path], None]) -> None:
    """Remove what temporary names of ``stem`` (an expression) stand for in ``parent`` and whose processes are gone:
    unlocked, and older than this one."""
    ours = re.compile(rf"{stem}\.[a-z0-9_]{{8}}\.tmp")  # as temporary names are here, and tempfile's
    for path in parent.iterdir():
        if not ours.fullmatch(path.name):
            continue
        with suppress(OSError):  # gone meanwhile, or another user's
            if path.is_symlink() or path.stat().st_mtime >= _STARTED:
                continue
            if (lock := _lock(path)) is not None:
                try:
                    remove(path)
                finally:
                    os.close(lock)


def _put_in_place(new: Path, place: Path) -> None:
    """Rename ``new`` to ``place``; what was there goes once that has worked, and comes back where it has not."""
    if not place.exists():
        os.replace(new, place)
        return
    retired = Path(tempfile.mkdtemp(prefix=f"{_stem(place)}.", suffix=".old", dir=place.parent))
    try:
        os.replace(place, retired / "old")
        os.replace(new, place)
    except BaseException:
        if (retired / "old").exists() and not place.exists():
            os.replace(retired / "old", place)
        raise
    finally:
        shutil.rmtree(retired, ignore_errors=True)


@contextmanager
def _looking_at(path: Path) -> Iterator[None]:
    """Raise OutputError where an output cannot even be looked at."""
    try:
        yield
    except OSError as error:  # too long a name, a folder that may not be entered
        raise output_error(error, path) from error
    except RuntimeError as error:  # of Path.resolve
        raise OutputError("is a loop of links", path=path, remedy="choose another output") from error


def refuse_non_empty(path: Path, *, force: bool | None) -> None:
    """Raise OutputError where ``path`` is a file, or a folder with something in it and ``force`` is off, or where no
    folder can be put; before any work, as :func:`refuse_unwritable` does. force: None where there is no such option."""
    path = Path(path)
    with _looking_at(path):
        if path.is_dir():
            if any(path.iterdir()) and not force:
                remedy = "choose another folder" if force is None else "pass --force to replace it"
                raise OutputError("exists and is not empty", path=path, remedy=remedy)
        elif path.exists():
            raise OutputError("exists and is not a folder", path=path, remedy="choose another output")
        _require_writable_parent(path.resolve(), path)


def refuse_folder(path: Path, kept: Iterable[Path | None], *, force: bool) -> None:
    """Raise OutputError as :func:`refuse_non_empty` and :func:`refuse_to_replace` do; None is nothing to keep."""
    refuse_non_empty(path, force=force)
    refuse_to_replace(path, [other for other in kept if other is not None])


def refuse_unwritable(path: Path) -> None:
    """Raise OutputError where no file can be put at ``path``, so that this is known before any work.

    Writes nothing. That a disk fills up while the work goes on cannot be known.
    """
    path = Path(path)
    with _looking_at(path):
        if path.is_dir():
            raise OutputError("is a folder", path=path, remedy="name a file in it")
        _require_writable_parent(path.absolute(), path)


def _require_writable_parent(place: Path, path: Path) -> None:
    """Raise OutputError, which names ``path``, where nothing can be put at the absolute ``place``."""
    parent = next((folder for folder in place.parents if folder.exists()), place)
    if not parent.is_dir():
        raise OutputError(f"{parent} is not a folder", path=path, remedy="choose another output")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise output_error(PermissionError(errno.EACCES, os.strerror(errno.EACCES)), path)


def refuse_to_replace(path: Path, kept: Iterable[Path]) -> None:
    """Raise OutputError where a folder put at ``path`` would take the place of one of ``kept``.

    ``--force`` replaces all that is in an output; nothing that a command reads, or caches for others, may lie
    there, nor the folder that it runs in.
    """
    place = Path(os.path.realpath(path))  # which takes loops of links, too
    for other in (*kept, Path.cwd()):
        if Path(os.path.realpath(other)).is_relative_to(place):
            raise OutputError(
                f"would replace {other}, which is in use here", path=path, remedy="choose another output"
            )
