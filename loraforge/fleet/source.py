"""What every command accepts as a fleet: one lock file, or adapter folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loraforge.errors import InputError, UsageError
from loraforge.fleet.download.fleet import fetch_fleet
from loraforge.fleet.lock import LockedAdapter, LockedBase, is_lock, load_lock, verify
from loraforge.fleet.options import DEFAULT, ReadOptions
from loraforge.fleet.parts import WHOLE, Part
from loraforge.fleet.peft_config import CONFIG_NAME
from loraforge.fleet.peft_io import Adapter, check_fleet, find_adapters, open_adapter, open_fleet
from loraforge.fleet.spec import refuse_spec


@dataclass(frozen=True)
class Place:
    """Where an adapter lies that is not opened yet; of a lock, what it states of it and of the base model."""

    name: str
    folder: Path
    locked: LockedAdapter | None = None
    base: LockedBase | None = None

    def open(self, options: ReadOptions = DEFAULT) -> Adapter:
        """Open it. Raises InputError as :func:`open_adapter` does, and for another base model than the lock's."""
        adapter = open_adapter(self.folder, name=self.name, options=options)
        for file in () if self.locked is None else self.locked.files:
            if [file.name] == [path.name for path in adapter.weights.files]:
                adapter.state_sha256(file.sha256)
        if self.base is not None:
            _same_base(adapter, self.base)
        return adapter


def places(paths: Sequence[Path], part: Part = WHOLE, *, fetch: bool = True) -> list[Place]:
    """The adapters of a fleet, or of a part of it, in its order and unopened; bytes that a lock states are verified.

    What a lock names elsewhere and the user's store lacks is fetched first, unless ``fetch`` is off. Raises UsageError
    where a lock is mixed with other arguments, for a fleet specification in place of its lock and for an empty part,
    IntegrityError for bytes that the lock does not state, and InputError for paths without adapters.
    """
    lock = lock_among(paths)
    if lock is not None:
        if fetch:
            fetch_fleet(load_lock(lock).part(part), lock)
        stated = verify(lock, part)
        found = [
            Place(adapter.name, stated.folder(adapter, lock), adapter, stated.base_model)
            for adapter in stated.adapters
        ]
    else:
        found = [Place(folder.resolve().name, folder) for folder in find_adapters(paths)]
    if not (chosen := found[part.slice]):
        raise UsageError(
            f"there is no part {part.number} of {len(found)} adapters",
            key="--part",
            remedy="make at most as many parts as there are adapters",
        )
    return chosen


def lock_among(paths: Sequence[Path]) -> Path | None:
    """The lock that ``paths`` is, or None for adapter folders. Raises UsageError for a mixture, and for a fleet
    specification in place of its lock."""
    for path in paths:
        refuse_spec(path)
    locks = [path for path in paths if is_lock(path)]
    if locks and len(paths) > 1:
        raise UsageError(
            "a fleet lock stands alone", path=locks[0], remedy="name one lock, or adapter folders only"
        )
    return Path(locks[0]) if locks else None


def open_source(paths: Sequence[Path], options: ReadOptions = DEFAULT) -> list[Adapter]:
    """Open the fleet of one ``.json`` lock (hashes checked), or the adapters in the folders named.

    What a lock names elsewhere and the user's store lacks is fetched first. Raises UsageError where a lock is mixed
    with other arguments, or a fleet specification is named in place of its lock, IntegrityError for bytes that the
    lock does not state, and InputError as :func:`open_fleet` does.
    """
    lock = lock_among(paths)
    return open_fleet(paths, options) if lock is None else resolve_fleet(lock, options)


def resolve_fleet(path: Path, options: ReadOptions = DEFAULT, *, fetch: bool = True) -> list[Adapter]:
    """Verify the lock at ``path`` and open its adapters, in its order; with ``fetch``, what is elsewhere is fetched."""
    return check_fleet([place.open(options) for place in places([path], fetch=fetch)])


def _same_base(adapter: Adapter, base: LockedBase) -> None:
    if adapter.base_model != base.name:
        raise InputError(
            f"base model is {adapter.base_model!r}, but the lock has {base.name!r}",
            path=adapter.path / CONFIG_NAME,
            key="base_model_name_or_path",
            remedy="lock adapters together with the base model that they were trained on",
        )
