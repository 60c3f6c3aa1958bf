"""Where the time of a factorisation goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stages:
    """Seconds by stage of one thread; ``merge`` adds those of another."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time of a ``with`` block to stage ``name``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - started)

    def add(self, name: str, seconds: float) -> None:
        """Add ``seconds`` to stage ``name``."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def merge(self, other: Stages) -> None:
        """Add the seconds of ``other``, stage by stage."""
        for name, seconds in other.seconds.items():
            self.add(name, seconds)
