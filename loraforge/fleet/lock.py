"""Fleet locks: which adapters over which base model, by size and SHA-256.

A lock names files relative to itself, so that a folder with its lock can be moved as a whole, or in hubs and at URLs
(:mod:`loraforge.fleet.locked_sources`), from where they come into the user's store. Here a lock is read, written and
re-hashed, without torch or network: the audit does all three. Locks are made in :mod:`loraforge.fleet.locking`, fetched
in :mod:`loraforge.fleet.download`, and adapters opened through one in :mod:`loraforge.fleet.source`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from loraforge.errors import InputError, IntegrityError
from loraforge.files import sha256_file, write_json
from loraforge.fleet.locked_sources import Name, PathSource, Sha256, Source, Strict, key_parts
from loraforge.fleet.parts import WHOLE, Part
from loraforge.fleet.spec import refuse_spec
from loraforge.fleet.store import Store
from loraforge.fleet.untrusted_json import read_untrusted_json, shown
from loraforge.fleet.untrusted_path import require_regular
from loraforge.progress import track
from loraforge.threads import in_threads

MAX_LOCK_BYTES = 32 << 20  # some ten thousand adapters of several files
_NOT_KNOWN = frozenset({"bytes", "sha256", "files", "commit"})  # what a list of adapters lacks to be a lock


class LockedFile(Strict):
    """One file of an adapter."""

    name: Name
    bytes: int = Field(ge=0)
    sha256: Sha256


class LockedAdapter(Strict):
    """One adapter; ``task`` is that of its recipe, where it has one."""

    name: Name
    task: str | None = None
    source: Source
    files: tuple[LockedFile, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _once(self) -> LockedAdapter:
        if len(self.hashes) != len(self.files):
            raise ValueError("two files have the same name")
        return self

    @property
    def hashes(self) -> dict[str, str]:
        """File name -> SHA-256."""
        return {file.name: file.sha256 for file in self.files}


class LockedBase(Strict):
    """The base model: its name in the adapters, where it comes from, and hashes of its files and tensors."""

    name: str
    source: str | None = None
    files: dict[str, Sha256] = Field(default={}, description="file name -> SHA-256")
    tensors_sha256: Sha256 | None = None


class FleetLock(Strict):
    """A whole fleet (``<fleet>.lock.json``)."""

    schema_: Literal["loraforge.fleet-lock/1"] = Field("loraforge.fleet-lock/1", alias="schema")
    name: Name
    base_model: LockedBase
    adapters: tuple[LockedAdapter, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _unique(self) -> FleetLock:
        names = [adapter.name for adapter in self.adapters]
        if len(set(names)) != len(names):
            raise ValueError("two adapters have the same name")
        return self

    def folder(self, adapter: LockedAdapter, lock: Path) -> Path:
        """Where the files of ``adapter`` lie, for a lock read from the file ``lock``: beside it, or in the user's
        store, once they have been fetched."""
        if isinstance(adapter.source, PathSource):
            return Path(os.path.normpath(Path(lock).parent / adapter.source.path))
        return Store.of_user().folder(adapter.hashes)

    def part(self, part: Part) -> FleetLock:
        """The lock with a part of its adapters alone, which may be none."""
        return self.model_copy(update={"adapters": self.adapters[part.slice]})

    def local_files(self, lock: Path) -> list[Path]:
        """All locked files that lie beside a lock read from the file ``lock``."""
        return [
            self.folder(adapter, lock) / file.name
            for adapter in self.adapters
            if isinstance(adapter.source, PathSource)
            for file in adapter.files
        ]


def load_lock(path: Path) -> FleetLock:
    """Read a lock without touching the adapters. Raises InputError that names the file and the key, and UsageError for
    a specification, which has no hashes."""
    refuse_spec(path)
    value = read_untrusted_json(path, max_bytes=MAX_LOCK_BYTES)
    try:
        return FleetLock.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(key_parts(first["loc"]))
        remedy = "make it with `loraforge fleet lock`"
        if first["type"] == "missing" and first["loc"][-1] in _NOT_KNOWN:
            raise InputError(
                "has no hashes, and without them nothing is fetched or opened",
                path=path,
                key=shown(key),
                remedy=remedy,
            ) from error
        raise InputError(
            f"not a fleet lock ({first['msg']})", path=path, key=shown(key) or None, remedy=remedy
        ) from error


def save_lock(lock: FleetLock, path: Path) -> None:
    """Write a lock atomically."""
    write_json(path, lock.model_dump(mode="json", by_alias=True))


def verify(path: Path, part: Part = WHOLE) -> FleetLock:
    """Re-hash every file that the lock at ``path`` names, or those of a part of its adapters.

    Raises InputError for a malformed lock, IntegrityError for a missing or changed file; the latter names the
    file and both hashes (or sizes).
    """
    lock = load_lock(path)

    def check(adapter: LockedAdapter) -> None:
        folder, local = lock.folder(adapter, path), isinstance(adapter.source, PathSource)
        for file in adapter.files:
            _verify_file(folder / file.name, file, path.parent if local else folder, _remedy(path, local))

    chosen = lock.adapters[part.slice]
    for _ in track(in_threads(check, chosen), "verify", len(chosen)):
        pass
    return lock


def is_lock(path: Path) -> bool:
    """Whether a command takes ``path`` for a fleet lock: a ``.json`` that is no folder of that name."""
    return Path(path).suffix == ".json" and not Path(path).is_dir()


def fleet_name(paths: Sequence[Path]) -> str:
    """What to call the fleet in ``paths``: the lock's name for it, or the first folder's."""
    first = Path(paths[0])
    return load_lock(first).name if is_lock(first) else first.resolve().name


def _remedy(lock: Path, local: bool) -> str:
    if local:
        return f"restore the file, or make the lock anew with `loraforge fleet lock` if the change is meant ({lock})"
    return f"fetch it with `loraforge fleet fetch {lock}`"


def _verify_file(path: Path, file: LockedFile, place: Path, remedy: str) -> None:
    if not path.is_file():
        raise IntegrityError(
            f"file not found, but locked with SHA-256 {file.sha256}", path=path, remedy=remedy
        )
    require_regular(path, place)
    size, found = path.stat().st_size, sha256_file(path)
    if size != file.bytes:
        raise IntegrityError(
            f"is {size} bytes (SHA-256 {found}), locked are {file.bytes} bytes (SHA-256 {file.sha256})",
            path=path,
            remedy=remedy,
        )
    if found != file.sha256:
        raise IntegrityError(f"SHA-256 is {found}, locked is {file.sha256}", path=path, remedy=remedy)
