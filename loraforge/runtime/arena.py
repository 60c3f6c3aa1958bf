"""Ranges of one fixed buffer, first fit, merged again when they are given back. No torch, no memory of its own."""

from __future__ import annotations

from bisect import bisect_left


class Arena:
    """Hands out ranges of ``capacity`` units."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._holes: list[tuple[int, int]] = [(0, capacity)] if capacity else []  # (start, units), by start

    @property
    def free(self) -> int:
        """Units that nobody holds, in one range or in several."""
        return sum(units for _, units in self._holes)

    def take(self, units: int) -> int | None:
        """The start of a range of ``units`` > 0, or None where no hole is long enough."""
        for place, (start, length) in enumerate(self._holes):
            if length >= units:
                rest = (start + units, length - units)
                self._holes[place : place + 1] = [rest] if rest[1] else []
                return start
        return None

    def give(self, start: int, units: int) -> None:
        """Take back a range that :meth:`take` gave."""
        place = bisect_left(self._holes, (start, 0))
        end = start + units
        after = place < len(self._holes) and self._holes[place][0] == end
        before = place > 0 and sum(self._holes[place - 1]) == start
        if after:
            end += self._holes[place][1]
        if before:
            start = self._holes[place - 1][0]
        self._holes[place - before : place + after] = [(start, end - start)]

    def pack(self, used: int) -> None:
        """Declare that what is held has been moved to the first ``used`` units."""
        self._holes = [(used, self.capacity - used)] if used < self.capacity else []
