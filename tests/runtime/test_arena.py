"""Ranges of a buffer: never two at one place, and none lost."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from loraforge.runtime.arena import Arena


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 64), st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=60))
def test_ranges_are_disjoint_and_merge_again(capacity: int, steps: list[tuple[bool, int]]) -> None:
    arena, held = Arena(capacity), dict[int, int]()
    for take, number in steps:
        if take:
            start = arena.take(number)
            if start is None:
                taken = {unit for begin, units in held.items() for unit in range(begin, begin + units)}
                runs = "".join("x" if unit in taken else " " for unit in range(capacity)).split("x")
                assert max(map(len, runs)) < number  # refused only where no hole is long enough
            else:
                assert 0 <= start <= capacity - number
                assert all(start + number <= other or other + units <= start for other, units in held.items())
                held[start] = number
        elif held:
            start = sorted(held)[number % len(held)]
            arena.give(start, held.pop(start))
        assert arena.free == capacity - sum(held.values())
    for start, units in held.items():
        arena.give(start, units)
    assert arena.take(capacity) == 0
    assert arena.free == 0


def test_packing_leaves_one_hole() -> None:
    arena = Arena(10)
    first, second = arena.take(4), arena.take(4)
    assert (first, second) == (0, 4)
    arena.give(0, 4)
    assert arena.take(6) is None
    arena.pack(4)
    assert arena.take(6) == 4
    arena.pack(10)
    assert arena.take(1) is None
