"""Every byte of a bag is the one that its manifests state, and there is no other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from loraforge.evidence.bag import TAG_FILES, Bag
from loraforge.evidence.checks.base import Check, Failure, Scope, guarded


class IntegrityCheck(Check):
    """BagIt validity with SHA-256, as the bagit library finds it, and no file outside the manifests."""

    title: ClassVar = "bag integrity"

    def count(self, scope: Scope) -> int:
        return len(scope.bags)

    def run(self, scope: Scope) -> Iterator[Failure]:
        for bag in scope.bags:
            yield from guarded(bag.path, lambda bag=bag: _look(bag))  # type: ignore[misc]


def _look(bag: Bag) -> Iterator[Failure]:
    import bagit

    missing = [name for name in TAG_FILES if not (bag.path / name).is_file()]
    for name in missing:
        yield Failure(bag.path / name, "file is missing")
    if missing:
        return
    tags = {bag.path / name for name in TAG_FILES}
    for path in sorted(bag.path.rglob("*")):
        if path.is_symlink():
            yield Failure(path, "is a link; a bag holds its own bytes")
        elif path.is_file() and bag.data not in path.parents and path not in tags:
            yield Failure(path, "file is not in any manifest")
    try:
        parsed = bagit.Bag(str(bag.path))
        # bagit stops at a wrong total before it looks which file is to blame; the total is checked last here.
        stated = parsed.info.pop("Payload-Oxum", None)
        parsed.validate()
        payload = [path.stat().st_size for path in bag.data.rglob("*") if path.is_file()]
        if stated != (found := f"{sum(payload)}.{len(payload)}"):
            yield Failure(bag.path / "bag-info.txt", f"Payload-Oxum is {stated}, the payload has {found}")
    except bagit.BagValidationError as error:
        if not error.details:
            yield Failure(bag.path, str(error))
        for detail in error.details:
            yield Failure(bag.path / getattr(detail, "path", "."), _words(detail))
    except bagit.BagError as error:
        yield Failure(bag.path, str(error))


def _words(detail: object) -> str:
    import bagit

    if isinstance(detail, bagit.ChecksumMismatch):
        if detail.found is None:
            return "file listed in the manifest is missing"
        return f"SHA-256 is {detail.found[:12]}…, the manifest says {detail.expected[:12]}…"
    if isinstance(detail, bagit.FileMissing):
        return "file listed in the manifest is missing"
    if isinstance(detail, bagit.UnexpectedFile):
        return "file is not in any manifest"
    return str(detail)
