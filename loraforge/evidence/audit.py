"""The audit: run every check, say how each went, then list every claim that failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from loraforge.errors import InputError
from loraforge.evidence.bag import Bag, find_bags
from loraforge.evidence.checks import BAG_CHECKS, CHECKS, Failure, Scope


def scope_of(path: Path, *, lock: Path | None = None, figures: Sequence[Path] = ()) -> Scope:
    """What to audit: a lone bag where ``path`` is one, else a root of bags with an index.

    Raises InputError where a path does not exist.
    """
    for folder in (path, *figures):
        if not Path(folder).is_dir():
            raise InputError("folder not found", path=folder)
    if lock is not None and not Path(lock).is_file():
        raise InputError("fleet lock not found", path=lock)
    if (path / "bagit.txt").is_file() or (path / "bag-info.txt").is_file():
        return Scope(None, (Bag(path),), lock, tuple(figures))
    return Scope(path, tuple(find_bags(path)), lock, tuple(figures))


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
