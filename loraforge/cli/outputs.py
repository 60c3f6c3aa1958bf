"""What a command may write over: an earlier output of its own kind. All else that lies there is somebody's."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from loraforge.errors import InputError, OutputError
from loraforge.files import read_json, refuse_unwritable

_MAX_LINE = 1 << 20  # bytes of a first record, and far more than one has


def refuse_allocation(path: Path) -> None:
    """Raise OutputError where no allocation file can be put at ``path``, or a file that is none lies there."""
    _refuse(path, _is_allocation, "allocation file")


def refuse_records(path: Path) -> None:
    """Raise OutputError where no records of modules can be put at ``path``, or a file that has none lies there."""
    _refuse(path, _has_records, "file of records")


def _refuse(path: Path, replaceable: Callable[[Path], bool], kind: str) -> None:
    refuse_unwritable(path)
    if path.is_file() and path.stat().st_size and not replaceable(path):
        raise OutputError(f"exists and is no {kind}", path=path, remedy="choose another name, or remove it")


def _is_allocation(path: Path) -> bool:
    if not _first_line(path).startswith(b"{"):  # gigabytes of tensors are not read whole
        return False
    try:
        value = read_json(path)
    except InputError:
        return False
    return isinstance(value, dict) and str(value.get("schema")).startswith("loraforge.allocation/")


def _has_records(path: Path) -> bool:
    try:
        first = json.loads(_first_line(path))
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and {"adapter", "module"} <= first.keys()


def _first_line(path: Path) -> bytes:
    if not os.access(path, os.R_OK):  # nor is it known, then, whose it is
        return b""
    with open(path, "rb") as stream:
        return stream.readline(_MAX_LINE)
