"""How many adapters of a fleet fit on the device at once, under a budget of bytes (paper 6.4, B.5, B.9).

A native pool gives every slot the same room, that of the largest rank the engine is started for: a slot takes

    width * max_rank * sum over modules of (d_in + d_out)

bytes, whatever the adapter in it keeps (``width``: bytes of an element). A shadow pool adds, to each such slot, a B of
its own, width * max_rank * sum of d_out. A ragged pool takes what adapters keep alive, so that a budget holds the
largest n for which the n largest adapters fit together: then any n do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from loraforge.errors import BudgetError
from loraforge.fleet.peft_io import LoraModule
from loraforge.runtime.pool import block_bytes
from loraforge.runtime.ranks import Projection

GIB = 1 << 30
# ranks that vLLM makes native buffers for
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)

Shape = tuple[int, int]  # d_in, d_out


def native_slot_bytes(shapes: Sequence[Shape], max_rank: int, width: int = 2) -> int:
    """Bytes of one slot of a native pool over modules of these shapes."""
    return width * max_rank * sum(d_in + d_out for d_in, d_out in shapes)


def shadow_slot_bytes(shapes: Sequence[Shape], max_rank: int, width: int = 2) -> int:
    """Bytes of one slot of a native pool and of the compact B beside it."""
    return native_slot_bytes(shapes, max_rank, width) + width * max_rank * sum(d_out for _, d_out in shapes)


def ragged_bytes(modules: Sequence[LoraModule], live: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes that an adapter takes in a ragged pool, alignment included. live: retained rank of each module."""
    return sum(
        block_bytes(Projection(module.name, module.d_in, (module.d_out,)), [rank], dtype)
        for module, rank in zip(modules, live, strict=True)
    )


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


def engine_rank(engine: Literal["vllm", "sglang"], largest: int) -> int:
    """The rank to start an engine for, that adapters of up to ``largest`` load: vLLM takes few.

    Raises BudgetError where it takes none as large.
    """
    if engine == "sglang":
        return largest
    for rank in VLLM_RANKS:
        if rank >= largest:
            return rank
    raise BudgetError(
        f"rank {largest} is above the {VLLM_RANKS[-1]} that vLLM takes", remedy="leave that adapter out"
    )


def _at_least_one(slots: int, needs: int, budget_bytes: int) -> int:
    if slots < 1:
        raise BudgetError(
            f"one adapter takes {needs / GIB:.3f} GiB, the budget is {budget_bytes / GIB:.3f} GiB",
            key="budget_gib",
            remedy="give more",
        )
    return slots
