"""What every command accepts as a fleet: one lock file, or adapter folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loraforge.errors import UsageError
from loraforge.fleet.lock import resolve_fleet
from loraforge.fleet.peft_io import Adapter, open_fleet


def open_source(paths: Sequence[Path]) -> list[Adapter]:
    """Open the fleet of one ``.json`` lock (hashes checked), or the adapters in the folders named.

    Raises UsageError where a lock is mixed with other arguments, IntegrityError for bytes that the lock does
    not state, and InputError as :func:`open_fleet` does.
    """
    locks = [path for path in paths if Path(path).suffix == ".json"]
    if not locks:
        return open_fleet(paths)
    if len(paths) > 1:
        raise UsageError(
            "a fleet lock stands alone", path=locks[0], remedy="name one lock, or adapter folders only"
        )
    return resolve_fleet(Path(locks[0]))
