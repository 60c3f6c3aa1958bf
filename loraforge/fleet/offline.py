"""Hugging Face libraries as this package uses them: optional, and offline, for all that they read is on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from loraforge.errors import MissingDependencyError

_SWITCHES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def is_offline() -> bool:
    """Whether the environment keeps this process off the network, by the switches of the Hugging Face libraries."""
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in _SWITCHES)


@contextmanager
def offline_imports() -> Iterator[None]:
    """A block to import transformers and its kin in, with their network access switched off first.

    They read the switches when they are imported, and a process that trains or converts never needs the network
    again: the switches stay. Raises MissingDependencyError, which names the package, where one is not installed.
    """
    os.environ.update(dict.fromkeys(_SWITCHES, "1"))
    try:
        yield
    except ImportError as error:
        raise MissingDependencyError(
            f"{error.name} is not installed", remedy="pip install 'loraforge[quality]'"
        ) from error
