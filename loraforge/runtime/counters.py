"""What an engine's process tells of its adapters while it runs: one small JSON file that is always whole."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

ENVIRONMENT = "LORAFORGE_COUNTERS"  # path of the file; no file where it is not set


def publish(values: Mapping[str, int | str | None]) -> None:
    """Replace the file. Not forced to the disk: it is read while the engine runs, and the engine must not wait."""
    given = os.environ.get(ENVIRONMENT)
    if given:
        path = Path(given)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(json.dumps(dict(values)) + "\n", encoding="utf-8")
        os.replace(beside, path)


def wanted() -> bool:
    """Whether there is a file to keep."""
    return bool(os.environ.get(ENVIRONMENT))
