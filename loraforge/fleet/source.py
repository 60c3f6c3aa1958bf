"""What every command accepts as a fleet: one lock file, or adapter folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loraforge.errors import InputError, UsageError
from loraforge.fleet.download.fleet import fetch_fleet
from loraforge.fleet.lock import LockedBase, is_lock, load_lock, verify
from loraforge.fleet.options import DEFAULT, ReadOptions
from loraforge.fleet.peft_config import CONFIG_NAME
from loraforge.fleet.peft_io import Adapter, check_fleet, open_adapter, open_fleet
from loraforge.fleet.spec import is_spec


def open_source(paths: Sequence[Path], options: ReadOptions = DEFAULT) -> list[Adapter]:
    """Open the fleet of one ``.json`` lock (hashes checked), or the adapters in the folders named.

    What a lock names elsewhere and the user's store lacks is fetched first. Raises UsageError where a lock is mixed
    with other arguments, or a fleet specification is named in place of its lock, IntegrityError for bytes that the
    lock does not state, and InputError as :func:`open_fleet` does.
    """
    for path in paths:
        if is_spec(path):
            raise UsageError(
                "is a list of adapters without hashes, and without them nothing is fetched or opened",
                path=path,
                remedy=f"run `loraforge fleet lock {path}` once, and name the lock that it writes",
            )
    locks = [path for path in paths if is_lock(path)]
    if not locks:
        return open_fleet(paths, options)
    if len(paths) > 1:
        raise UsageError(
            "a fleet lock stands alone", path=locks[0], remedy="name one lock, or adapter folders only"
        )
    return resolve_fleet(Path(locks[0]), options)


def resolve_fleet(path: Path, options: ReadOptions = DEFAULT, *, fetch: bool = True) -> list[Adapter]:
    """Verify the lock at ``path`` and open its adapters, in its order; with ``fetch``, what is elsewhere is fetched."""
    if fetch:
        fetch_fleet(load_lock(path), path)
    lock = verify(path)
    fleet = [
        open_adapter(lock.folder(adapter, path), name=adapter.name, options=options)
        for adapter in lock.adapters
    ]
    check_fleet(fleet)
    for adapter, locked in zip(fleet, lock.adapters, strict=True):
        for file in locked.files:
            if [file.name] == [path.name for path in adapter.weights.files]:
                adapter.state_sha256(file.sha256)
    _same_base(fleet[0], lock.base_model)
    return fleet


def _same_base(adapter: Adapter, base: LockedBase) -> None:
    if adapter.base_model != base.name:
        raise InputError(
            f"base model is {adapter.base_model!r}, but the lock has {base.name!r}",
            path=adapter.path / CONFIG_NAME,
            key="base_model_name_or_path",
            remedy="lock adapters together with the base model that they were trained on",
        )
