"""The store: every downloaded file once, named by its SHA-256, and adapter folders made of links to them.

    blobs/<sha256>            whole and checked; read-only
    snapshots/<digest>/<name> links to blobs: what readers, PEFT and engines open as an adapter folder
    partial/<key>             under way; see :mod:`loraforge.fleet.download.part`

The two first are laid out as the hub's own cache is. Nothing in it is precious: whatever is removed is fetched again.
No torch here, and no network.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from loraforge.errors import IntegrityError, OutputError
from loraforge.files import (
    atomic_path,
    canonical_json,
    output_error,
    refuse_unwritable,
    scratch_folder,
    sha256_file,
    sha256_text,
    sweep_files,
)

VARIABLE = "LORAFORGE_STORE"


class Store:
    """A store at ``root``, which need not exist yet."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def of_user(cls) -> Store:
        """The one that every command uses: ``LORAFORGE_STORE``, or ``loraforge/store`` in the user's cache folder."""
        if named := os.environ.get(VARIABLE):
            return cls(Path(named).expanduser().absolute())
        caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return cls(Path(caches).expanduser().absolute() / "loraforge" / "store")

    @property
    def partial(self) -> Path:
        return self.root / "partial"

    def prepare(self) -> None:
        """Make the folders. Raises OutputError where they cannot be made or written."""
        for folder in (self.partial, self.blobs):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                refuse_unwritable(folder / "any")
            except (OSError, OutputError) as error:
                told = output_error(error, folder) if isinstance(error, OSError) else error
                remedy = f"make it writable, or name another store in {VARIABLE}"
                raise OutputError(told.problem, path=folder, remedy=remedy) from error
        sweep_files(self.blobs)

    @property
    def blobs(self) -> Path:
        return self.root / "blobs"

    def blob(self, sha256: str) -> Path:
        """Where the file of that hash lies, or would."""
        return self.blobs / sha256

    def has(self, sha256: str, size: int | None) -> bool:
        """Whether that file is here, in its size; the bytes are for ``verify`` to read."""
        path = self.blob(sha256)
        return path.is_file() and (size is None or path.stat().st_size == size)

    def put(self, pieces: Callable[[], Iterable[bytes]], shown: str, stated: str | None = None) -> str:
        """Put a file here, of which ``pieces`` gives the content, twice if need be; returns its SHA-256.

        Raises IntegrityError, before anything is written, where that is not the one ``stated``; OutputError.
        """
        digest, size = hashlib.sha256(), 0
        for piece in pieces():
            digest.update(piece)
            size += len(piece)
        sha256 = digest.hexdigest()
        if stated not in (None, sha256):
            raise IntegrityError(
                f"SHA-256 is {sha256}, locked is {stated}", path=shown, remedy="lock it anew if that is meant"
            )
        if not self.has(sha256, size):
            with atomic_path(self.blob(sha256)) as temporary, open(temporary, "wb") as stream:
                stream.writelines(pieces())
        return sha256

    def drop_damaged(self, sha256: str) -> None:
        """Remove the file of that hash where its bytes have another."""
        path = self.blob(sha256)
        if path.is_file() and sha256_file(path) != sha256:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise output_error(error, path) from error

    def folder(self, files: Mapping[str, str]) -> Path:
        """Where an adapter of these files (name -> SHA-256) lies as a folder, or would."""
        return self.root / "snapshots" / sha256_text(canonical_json(dict(files)))[:32]

    def link(self, files: Mapping[str, str]) -> Path:
        """Make :meth:`folder` of blobs that are here, unless it is right already. Raises OutputError."""
        place = self.folder(files)
        if self._is_whole(place, files):
            return place
        with scratch_folder(place) as scratch:
            new = scratch / "new"
            try:
                new.mkdir()
                for name, sha256 in files.items():
                    (new / name).symlink_to(_to_blob(sha256))
                if place.exists():  # changed by hand
                    place.rename(scratch / "old")
                new.rename(place)
            except OSError as error:
                if not self._is_whole(place, files):  # else another process was faster
                    raise output_error(error, place) from error
        return place

    @staticmethod
    def _is_whole(place: Path, files: Mapping[str, str]) -> bool:
        try:
            return {path.name: os.readlink(path) for path in place.iterdir()} == {
                name: _to_blob(sha256) for name, sha256 in files.items()
            }
        except OSError:
            return False


def _to_blob(sha256: str) -> str:
    return os.path.join("..", "..", "blobs", sha256)
