"""What a command may write over: an earlier output of its own kind. All else that lies there is somebody's."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loraforge.errors import InputError, OutputError
from loraforge.files import read_json, refuse_unwritable

_MAX_LINE = 1 << 20  # bytes of a first record, and far more than one has


def refuse_allocation(path: Path) -> None:
    """Raise OutputError where no allocation file can be put at ``path``, or a file that is none lies there."""
    _refuse(path, lambda found: _states(found, "loraforge.allocation/"), "allocation file")


def refuse_lock(path: Path) -> None:
    """The same of a fleet lock."""
    _refuse(path, lambda found: _states(found, "loraforge.fleet-lock/"), "fleet lock")


def refuse_records(path: Path) -> None:
    """The same of records of modules."""
    _refuse(path, lambda found: {"adapter", "module"} <= _first_object(found).keys(), "file of records")


def refuse_scores(path: Path) -> None:
    """The same of records of scores."""
    _refuse(path, lambda found: {"adapter", "arm", "score"} <= _first_object(found).keys(), "file of scores")


def refuse_selection(path: Path) -> None:
    """The same of a selection of policies."""
    _refuse(path, lambda found: _first_object(found).get("record") == "selection", "selection of policies")


def refuse_measurements(path: Path) -> None:
    """The same of what a benchmark measured."""
    _refuse(
        path, lambda found: bool({"record", "pass"} & _first_object(found).keys()), "file of measurements"
    )


def refuse_workload(path: Path) -> None:
    """The same of a workload."""
    _refuse(
        path,
        lambda found: str(_first_object(found).get("schema")).startswith("loraforge.workload/"),
        "workload",
    )


def refuse_moments(path: Path) -> None:
    """The same of moments."""

    def is_one(found: Path) -> bool:
        from loraforge.activation.moments import stated_norm  # with torch, which an absent file spares

        return stated_norm(found) is not None

    _refuse(path, is_one, "file of moments")


def _refuse(path: Path, replaceable: Callable[[Path], bool], kind: str) -> None:
    refuse_unwritable(path)
    if path.is_file() and path.stat().st_size and not replaceable(path):
        raise OutputError(f"exists and is no {kind}", path=path, remedy="choose another name, or remove it")


def _states(path: Path, schema: str) -> bool:
    if not _first_line(path).startswith(b"{"):  # gigabytes of tensors are not read whole
        return False
    try:
        value = read_json(path)
    except InputError:
        return False
    return isinstance(value, dict) and str(value.get("schema")).startswith(schema)


def _first_object(path: Path) -> dict[str, Any]:
    try:
        first = json.loads(_first_line(path))
    except (ValueError, RecursionError):
        return {}
    return first if isinstance(first, dict) else {}


def _first_line(path: Path) -> bytes:
    if not os.access(path, os.R_OK):  # nor is it known, then, whose it is
        return b""
    with open(path, "rb") as stream:
        return stream.readline(_MAX_LINE)
