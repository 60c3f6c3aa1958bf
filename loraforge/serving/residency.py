"""How many adapters of a fleet fit on the device at once, under a budget of bytes (paper 6.4, B.5, B.9).

A native pool gives every slot the same room, that of the largest rank the engine is started for: a slot takes

    width * max_rank * sum over modules of (d_in + d_out)

bytes, whatever the adapter in it keeps (``width``: bytes of an element). A shadow pool adds, to each such slot, a B of
its own, width * max_rank * sum of d_out. A ragged pool takes what adapters keep alive, so that a budget holds the
largest n for which the n largest adapters fit together: then any n do.
"""

from __future__ import annotations

from collections.abc import Sequence

from loraforge.errors import BudgetError

GIB = 1 << 30
Shape = tuple[int, int]  # d_in, d_out


def native_slot_bytes(shapes: Sequence[Shape], max_rank: int, width: int = 2) -> int:
    """Bytes of one slot of a native pool over modules of these shapes."""
    return width * max_rank * sum(d_in + d_out for d_in, d_out in shapes)


def shadow_slot_bytes(shapes: Sequence[Shape], max_rank: int, width: int = 2) -> int:
    """Bytes of one slot of a native pool and of the compact B beside it."""
    return native_slot_bytes(shapes, max_rank, width) + width * max_rank * sum(d_out for _, d_out in shapes)


def uniform_slots(budget_bytes: int, slot_bytes: int, wanted: int) -> int:
    """Slots of a pool that gives each the same room: what the budget pays for, at most ``wanted``.

    Raises BudgetError where it pays for none.
    """
    return _at_least_one(min(budget_bytes // slot_bytes, wanted), slot_bytes, budget_bytes)


def ragged_slots(budget_bytes: int, adapters: Sequence[int]) -> int:
    """The most adapters of which any choice fits, given the bytes of each. Raises BudgetError where that is none."""
    largest = sorted(adapters, reverse=True)
    used = slots = 0
    for needs in largest:
        used += needs
        if used > budget_bytes:
            break
        slots += 1
    return _at_least_one(slots, largest[0], budget_bytes)


def ragged_pool_bytes(budget_bytes: int | None, slots: int, adapters: Sequence[int]) -> int:
    """Bytes to give a ragged pool of so many slots: all that adapters in them can take, and no more."""
    most = sum(sorted(adapters, reverse=True)[:slots])
    return most if budget_bytes is None else min(most, budget_bytes)


def _at_least_one(slots: int, needs: int, budget_bytes: int) -> int:
    if slots < 1:
        raise BudgetError(
            f"one adapter takes {needs / GIB:.3f} GiB, the budget is {budget_bytes / GIB:.3f} GiB",
            key="budget_gib",
            remedy="give more",
        )
    return slots
