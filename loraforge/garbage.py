"""Python's collector of cycles, left out where it finds nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Leave cycles alone in this block: a fleet is hundreds of thousands of records, none in one, and each collection
    would go through all of them while every thread waits."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
