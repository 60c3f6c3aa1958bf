"""What a user allows, and tells, the readers of adapters beyond the folders themselves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ReadOptions:
    """``allow_pickle``: read ``.bin`` checkpoints too, by torch's restricted reader. ``base``: the folder of the base
    model, for kinds of adapters that do not state the shapes of what they adapt (VeRA)."""

    allow_pickle: bool = False
    base: Path | None = None


DEFAULT = ReadOptions()
