"""What a scheduler admits: a JSON line for every step that was not empty (paper, B.7). Knows no engine."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from loraforge.errors import OutputError


@dataclass(frozen=True)
class Step:
    """One step, as it was scheduled.

    time: seconds since the epoch. held: whether prompts had to wait for decodes. Tokens of prompts and of requests that
    decode, and how many requests these are; running: requests that hold KV; unfinished: these and those that wait.
    """

    step: int
    time: float
    held: bool
    prefill_tokens: int
    decode_tokens: int
    prefill_requests: int
    decode_requests: int
    running: int
    unfinished: int


class AdmissionTrace:
    """A file that steps are added to while an engine runs. A line is whole even if the engine is killed."""

    def __init__(self, path: Path, key: str) -> None:
        """Begin the file anew. key: the option that names it. Raises OutputError where it cannot be written."""
        try:
            self._stream: TextIO = path.open("w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise OutputError(
                error.strerror or str(error), path=path, key=key, remedy="name a file that can be written"
            ) from error

    def add(
        self,
        step: int,
        *,
        held: bool,
        prefill: tuple[int, int],
        decode: tuple[int, int],
        running: int,
        unfinished: int,
    ) -> None:
        """Note a step, which is scheduled now. prefill, decode: (tokens, requests)."""
        noted = Step(
            step, time.time(), held, prefill[0], decode[0], prefill[1], decode[1], running, unfinished
        )
        self._stream.write(json.dumps(asdict(noted)) + "\n")

    def close(self) -> None:
        """Close the file; nothing may be added after."""
        self._stream.close()
