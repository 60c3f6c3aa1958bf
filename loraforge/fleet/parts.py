"""A part of a fleet, by adapter: what one job of many works on."""

from __future__ import annotations

import re
from dataclasses import dataclass

from loraforge.errors import UsageError


@dataclass(frozen=True)
class Part:
    """Every ``count``-th adapter from the ``number``-th on, counted from 1: parts of equal work wherever adapters come
    in order of size."""

    number: int = 1
    count: int = 1

    @property
    def slice(self) -> slice:
        """Of the fleet's adapters, in its order."""
        return slice(self.number - 1, None, self.count)


WHOLE = Part()


def parse_part(text: str | None) -> Part:
    """The part ``2/8``, or the whole. Raises UsageError for what is none."""
    if text is None:
        return WHOLE
    match = re.fullmatch(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})", text)
    if match is None or int(match[1]) > int(match[2]):
        raise UsageError(f"{text!r} is not a part", key="--part", remedy="write the second of eight as 2/8")
    return Part(int(match[1]), int(match[2]))
