"""Exported files name no place on the machine that wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any


def portable_name(text: str) -> str:
    """The last component of an absolute path, of either kind of system; any other text as it is."""
    for kind in (PurePosixPath, PureWindowsPath):
        if kind(text).is_absolute():
            return kind(text).name or text
    return text.rstrip("/").rpartition("/")[2] if text.startswith("~") else text


def portable(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration whose texts are no absolute paths; the base model's keeps its last component, as a name."""
    return {key: portable_name(value) if isinstance(value, str) else value for key, value in config.items()}
