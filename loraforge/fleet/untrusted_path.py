"""Files in a folder that a stranger made: only regular files, and only inside it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from loraforge.errors import InputError


def plain_name(name: str) -> bool:
    """Whether ``name`` is one component of a path, printable, and neither ``.`` nor ``..``."""
    return (
        bool(name)
        and name not in (".", "..")
        and not any(mark in name for mark in "/\\")
        and name.isprintable()
        and len(os.fsencode(name)) <= 255
    )


def require_regular(path: Path, folder: Path) -> None:
    """Raise InputError where ``path``, which exists, is no regular file, or a link that leads out of ``folder``.

    The one link outside that is followed is the hub cache's own, from ``snapshots/<revision>`` to ``blobs`` beside it.
    Pipes and devices are refused before they are opened: they would never end.
    """
    try:
        target = path.resolve(strict=True)
        mode = os.stat(target).st_mode
    except (OSError, RuntimeError) as error:  # a loop of links
        raise InputError(f"cannot be read ({error})", path=path) from error
    place = folder.resolve()
    inside = target.is_relative_to(place)
    hub = place.parent.name == "snapshots" and target.parent == place.parent.parent / "blobs"
    if not inside and not hub:
        raise InputError(
            "is a link that leads out of its folder", path=path, remedy="put the file itself there"
        )
    if not stat.S_ISREG(mode):
        raise InputError("is not a regular file", path=path, remedy="put a plain file there")
