"""What a run that may be stopped has finished: one JSON object a line, appended as it goes, taken up again later."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from loraforge.errors import InputError
from loraforge.files import output_error, write_text


class BudgetEnded(Exception):
    """A run's time is used up; what it finished is in its journal."""


def take_up(path: Path) -> list[Any]:
    """The records of a journal, whose folder is made if need be; a torn last line goes, to be made again.

    Raises InputError for any other line that is no JSON: a run that ends tears its last line alone.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            return []
        *lines, torn = path.read_bytes().split(b"\n")
    except OSError as error:
        raise output_error(error, path) from error
    records = _parsed(lines, path)
    if torn:
        write_text(
            path, "".join(f"{line.decode()}\n" for line in lines)
        )  # whole or not at all: it is all there is
    return records


def finished(path: Path) -> list[Any]:
    """The records of a journal that another run is to take up, which is left as it is: all but a torn last line.

    Raises InputError as :func:`take_up` does, and for a file that cannot be read.
    """
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", path=path) from error
    return _parsed(lines, path)


def append(path: Path, record: Any) -> None:
    """Add a record and hand it to the system, so that it outlives this process. Raises OutputError where the file
    system does not take it."""
    try:
        with path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n")
    except OSError as error:
        raise output_error(error, path) from error


class Memo:
    """Results by key, computed once over all the runs that share ``path`` (None: kept in memory alone).

    What a result depends on belongs into its key: a key that was never seen is computed, whatever else is there.
    budget_s: seconds after which :meth:`recall` computes nothing more.
    """

    def __init__(self, path: Path | None = None, budget_s: float | None = None) -> None:
        self._path = path
        self._deadline = None if budget_s is None else time.monotonic() + budget_s
        records = [] if path is None else take_up(path)
        self._known: dict[str, Any] = {record["key"]: record["value"] for record in records}

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def recall(self, key: str, compute: Callable[[], Any]) -> Any:
        """The result under ``key``, plain values. Raises BudgetEnded where it is not known and the time is up."""
        if key not in self._known:
            if self._deadline is not None and time.monotonic() > self._deadline:
                raise BudgetEnded
            value = compute()
            if self._path is not None:
                append(self._path, {"key": key, "value": value})
            self._known[key] = value
        return self._known[key]


def _parsed(lines: Sequence[bytes], path: Path) -> list[Any]:
    return [_parse(line, number, path) for number, line in enumerate(lines, start=1) if line.strip()]


def _parse(line: bytes, number: int, path: Path) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"line {number} is damaged ({error})",
            path=path,
            remedy="take the file as it was written, or choose another folder",
        ) from error
