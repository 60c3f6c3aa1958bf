"""The audit: run every check, say how each went, then list every claim that failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from loraforge.errors import InputError
from loraforge.evidence.bag import Bag, find_bags
from loraforge.evidence.checks import BAG_CHECKS, CHECKS, Failure, Scope

EVIDENCE = Path("evidence")  # the committed evidence, from the root of the repository


def scope_of(path: Path, *, locks: Sequence[Path] = (), figures: Sequence[Path] = ()) -> Scope:
    """What to audit: a lone bag where ``path`` is one, else a root of bags with an index.

    Raises InputError where a path does not exist.
    """
    for folder in (path, *figures):
        if not Path(folder).is_dir():
            raise InputError("folder not found", path=folder)
    for lock in locks:
        if not Path(lock).is_file():
            raise InputError("fleet lock not found", path=lock)
    if (path / "bagit.txt").is_file() or (path / "bag-info.txt").is_file():
        return Scope(None, (Bag(path),), tuple(locks), tuple(figures))
    return Scope(path, tuple(find_bags(path)), tuple(locks), tuple(figures))


def fleet_locks(root: Path) -> list[Path]:
    """Every fleet lock of the repository whose committed evidence is ``root``, sorted by name."""
    return sorted(root.parent.glob("config/fleets/*.lock.json"))


def figure_folders(root: Path) -> list[Path]:
    """The drawn figures of the repository whose committed evidence is ``root``, where there are any."""
    folder = root.parent / "docs" / "figures"
    return [folder] if folder.is_dir() else []


def audit(scope: Scope, say: Callable[[str], None]) -> list[Failure]:
    """Run all checks, ``say`` one line on each as it ends, and give every claim that failed, once."""
    found: dict[Failure, None] = {}
    for check in CHECKS:
        number = check.count(scope)
        if not number:
            continue
        failures = list(dict.fromkeys(check.run(scope)))
        verdict = f"{len(failures)} failed" if failures else "ok"
        say(f"{check.title:<18} {number:>4} checked  {verdict}")
        found |= dict.fromkeys(failures)
    return list(found)


def audit_bag(bag: Bag) -> list[Failure]:
    """Every claim of one bag that fails, wherever it lies: integrity, schemas, claims, summary and tables."""
    scope = Scope(None, (bag,))
    return [failure for check in BAG_CHECKS for failure in check.run(scope)]
