"""Digests of source code: what a cache key and a workflow parameter need to see an edit of a stage."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def source_files(*parts: str) -> dict[str, Path]:
    """Python files of the named parts of the package, by path relative to it.

    ``source_files("factor", "files.py")`` is all of ``loraforge/factor`` and one module beside it.
    """
    found: dict[str, Path] = {}
    for part in parts:
        root = _PACKAGE / part
        files = sorted(root.rglob("*.py")) if root.is_dir() else [root]
        for file in files:
            found[file.relative_to(_PACKAGE).as_posix()] = file
    return dict(sorted(found.items()))


@cache
def source_digest(*parts: str) -> str:
    """Hex SHA-256 over the names and contents of :func:`source_files`; 16 characters suffice as a key."""
    digest = hashlib.sha256()
    for name, file in source_files(*parts).items():
        digest.update(name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
