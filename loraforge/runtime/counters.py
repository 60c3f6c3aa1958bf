"""What an engine's process tells of its adapters while it runs: one small JSON file that is always whole."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from loraforge.files import output_error

ENVIRONMENT = "LORAFORGE_COUNTERS"  # path of the file; no file where it is not set


def publish(values: Mapping[str, int | str | None]) -> None:
    """Replace the file. Not forced to the disk: it is read while the engine runs, and the engine must not wait.

    Raises OutputError where it cannot be written; it is removed then, so that nobody takes what was for what is.
    """
    given = os.environ.get(ENVIRONMENT)
    if not given:
        return
    path = Path(given)
    beside = path.parent / f".{path.name}.{os.getpid()}"
    try:
        beside.write_text(json.dumps(dict(values)) + "\n", encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        for stale in (beside, path):
            with suppress(OSError):
                stale.unlink()
        raise output_error(error, path) from error


def wanted() -> bool:
    """Whether there is a file to keep."""
    return bool(os.environ.get(ENVIRONMENT))
