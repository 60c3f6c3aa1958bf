"""Promotion: a bag of a run becomes committed evidence once the audit finds nothing wrong with it."""

from __future__ import annotations

import shutil
from pathlib import Path

from loraforge.errors import IntegrityError
from loraforge.evidence.audit import audit_bag
from loraforge.evidence.bag import Bag
from loraforge.evidence.index import write_index
from loraforge.files import atomic_folder, sha256_file


def promote(bag: Bag, root: Path, *, force: bool = False) -> Path:
    """Copy a bag that the audit finds valid to ``root`` and rewrite its index.

    A bag that is there already with the same bytes is left alone. Raises IntegrityError that names the first claim
    that failed, OutputError where another bag of that name is there, unless ``force``.
    """
    failures = audit_bag(bag)
    if failures:
        raise IntegrityError(failures[0].claim, path=failures[0].path, remedy="make the bag again")
    destination = Path(root) / bag.run.name
    there = destination / "tagmanifest-sha256.txt"
    if not (there.is_file() and sha256_file(there) == bag.manifest_sha256):
        with atomic_folder(destination, force=force) as folder:
            shutil.copytree(bag.path, folder, dirs_exist_ok=True)
    write_index(root)
    return destination
