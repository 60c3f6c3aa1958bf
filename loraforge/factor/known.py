"""Adapters that were read before, told by the identity of their files: what spares a fleet of thousands a second
reading.

As git does for its working tree: a file whose place, size, times and inode are what they were holds what it held. Times
are those of the last change of contents and of the inode; the latter no program sets. A file that was changed in the
two seconds before it was read is not remembered, since a second change might leave the same times.
"""

from __future__ import annotations

import os
import stat
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loraforge.digest import source_digest
from loraforge.errors import InputError
from loraforge.files import canonical_json, read_json, sha256_text, write_json
from loraforge.fleet.peft_config import CONFIG_NAME, WEIGHTS_NAME
from loraforge.fleet.source import Place

SCHEMA = "loraforge.known-adapter/1"
SETTLED_S = 2.0


@dataclass(frozen=True)
class Content:
    """What a plan needs of an adapter beside its spectra: the digest that its key is made of
    (:func:`~loraforge.factor.cache.content_digest`), and its base model."""

    content: str
    base_model: str


class Known:
    """The adapters that the cache in folder ``cache`` remembers: a small file each, so that jobs on several machines
    write side by side."""

    def __init__(self, cache: Path) -> None:
        self._folder = Path(cache) / "known"

    def identity(self, place: Place) -> str | None:
        """The identity of an adapter's configuration and weights, as a name: by their hashes where a lock states those,
        and they were verified; by their place, sizes, times and inodes elsewhere.

        None for what is not remembered: weights in several files or a pickle, links, and files changed just now.
        """
        stated: list[Any] = []
        hashes = {} if place.locked is None else {file.name: file.sha256 for file in place.locked.files}
        for name in (CONFIG_NAME, WEIGHTS_NAME):
            found = hashes.get(name) if place.locked is not None else _settled(place.folder / name)
            if found is None:
                return None
            stated.append(found)
        where = [] if place.locked is not None else [str(place.folder.resolve())]
        # other code may read the same files differently
        return sha256_text(canonical_json([SCHEMA, source_digest("fleet"), *where, stated]))

    def recall(self, identity: str) -> Content | None:
        """What is remembered of the adapter of that identity."""
        try:
            value = read_json(self._folder / f"{identity}.json")
            return Content(value["content"], value["base_model"])
        except (InputError, LookupError, TypeError):
            return None

    def remember(self, identity: str, content: Content) -> None:
        """Keep what was read of the adapter of that identity."""
        write_json(self._folder / f"{identity}.json", {"schema": SCHEMA, **asdict(content)})


def _settled(path: Path) -> list[int] | None:
    """What tells a file from any other that was, or will be, there; None for no plain file or one changed just now."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode) or time.time() - max(found.st_mtime, found.st_ctime) < SETTLED_S:
        return None
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
