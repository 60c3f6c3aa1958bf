"""The pool that an engine's options ask for, and whether its adapters fit."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

import torch

from loraforge.errors import LoraForgeError
from loraforge.runtime.packed import Layout
from loraforge.runtime.pool import RaggedPool
from loraforge.runtime.ranks import Projection
from loraforge.runtime.shadow import ShadowPool, native_bytes


def make_pool(
    kind: str,
    projections: Iterable[Projection],
    slots: int,
    rank: int,
    given_bytes: int | None,
    dtype: torch.dtype,
    device: torch.device | str,
) -> RaggedPool:
    """A pool, ``ragged`` or ``shadow``, of ``given_bytes``, or with room for adapters of rank ``rank`` in every slot;
    the engine's buffers are part of a shadow pool's."""
    projections = list(projections)
    a, b = Layout(projections, dtype).sizes({its.name: [rank] * len(its.channels) for its in projections})
    if kind == "shadow":
        capacity = given_bytes or native_bytes(projections, slots, rank, dtype) + slots * b
        return ShadowPool(projections, slots, rank, capacity, dtype, device)
    return RaggedPool(projections, slots, given_bytes or slots * (a + b), dtype, device)


def require_room(
    pool: RaggedPool, footprints: Mapping[object, int], adapter: object, *, key: str, flag: str
) -> None:
    """Raise LoraForgeError where the adapters that may meet in one batch do not fit into ``pool``: no batch can then
    fail for want of room.

    footprints: bytes of the pool that each registered adapter takes, ``adapter``, the newest, among them. key: the
    option that gives the pool's bytes. flag: that which gives the engine's slots.
    """
    most = sum(heapq.nlargest(pool.slots, footprints.values()))
    if most > pool.room_bytes:
        raise LoraForgeError(
            f"adapter {adapter} needs {footprints[adapter]} bytes of the pool; with the largest others in "
            f"{pool.slots} slots that makes {most}, and the pool has {pool.room_bytes}",
            key=key,
            remedy=f"give the pool more bytes or the engine fewer slots ({flag})",
        )
