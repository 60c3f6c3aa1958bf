"""Which tokens belong to which adapter: tokens sorted by slot and cut into segments of at most ``tile`` rows.

Made once a step, on the device, and shared by every layer and projection. The capacity of its tensors depends on the
numbers of tokens and slots alone, never on the routing, so that a captured graph serves any batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BASE = -1  # the slot of a token that takes the base model alone, and of a graph's padding


def capacity(tokens: int, slots: int, tile: int) -> int:
    """The most segments that ``tokens`` tokens over ``slots`` slots can make: whole tiles, and a rest a slot."""
    return min(tokens, tokens // tile + min(slots, tokens))


@dataclass(frozen=True)
class Plan:
    """One batch at one tile height.

    token_slots: int32 [T], slot of each token, ``BASE`` or any negative number for none.
    order: int32 [T], the tokens that have a slot, by slot, in their order; what follows them is unused.
    segments: int32 [capacity, 4], (first place in ``order``, rows, slot, 0); rows of one segment share a slot.
    count: int32 [1], how many segments are live.
    tile: the most rows a segment has.
    """

    token_slots: Tensor
    order: Tensor
    segments: Tensor
    count: Tensor
    tile: int

    @property
    def tokens(self) -> int:
        return self.token_slots.shape[0]

    @property
    def segment_capacity(self) -> int:
        return self.segments.shape[0]


def empty_plan(tokens: int, slots: int, tile: int, device: torch.device | str = "cpu") -> Plan:
    """A plan's tensors, no token having a slot."""
    return Plan(
        torch.full((tokens,), BASE, dtype=torch.int32, device=device),
        torch.zeros(tokens, dtype=torch.int32, device=device),
        torch.zeros((capacity(tokens, slots, tile), 4), dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        tile,
    )


def fill_reference(plan: Plan, slots: int) -> None:
    """Fill ``order``, ``segments`` and ``count`` from ``token_slots``, in plain Python: the oracle of the kernels."""
    routing = plan.token_slots.tolist()
    order: list[int] = []
    segments: list[tuple[int, int, int, int]] = []
    for slot in range(slots):
        mine = [token for token, its in enumerate(routing) if its == slot]
        for start in range(0, len(mine), plan.tile):
            segments.append((len(order) + start, min(plan.tile, len(mine) - start), slot, 0))
        order += mine
    if order:
        plan.order[: len(order)] = torch.tensor(order, dtype=torch.int32)
        plan.segments[: len(segments)] = torch.tensor(segments, dtype=torch.int32)
    plan.count.fill_(len(segments))
