"""Per-slot device metadata: where an adapter's factors lie and how many directions are live (paper, A.2).

One table a projection (a base layer, or a fused group of up to three), one row a slot and slice, 32 bytes a row, so
that a kernel reads a row with two 16-byte loads and nothing about ranks is ever known to the host. Kernels trust the
table: it is written by :class:`SlotTable` alone, in place, so that captured graphs stay valid.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from loraforge.errors import LoraForgeError

WORDS = 4  # int64 words a row: A offset, B offset, rank | width << 32, scale (float32 bits)
MAX_SLICES = 3
VECTOR = 8  # 2-byte elements that a GPU's kernels load at once
_PAIR = struct.Struct("<iI")
_SCALE = struct.Struct("<fI")
_WORD = struct.Struct("<q")


def bucket(rank: int) -> int:
    """The width of a compact row of B: the power of two at or above ``rank``; 0 for rank 0."""
    return 1 << (rank - 1).bit_length() if rank > 0 else 0


@dataclass(frozen=True)
class Slot:
    """One slot and slice.

    a_offset, b_offset: in elements, from the first element of the A and B operands that are passed to an op.
        Direction j of A is the ``d_in`` contiguous elements at ``a_offset + j * d_in``; row n of B (one output
        channel) starts at ``b_offset + n * width``.
    rank: live directions, 0 for none. width: elements from one row of B to the next, at least ``rank``: its bucket in
        a compact pool, the pool's capacity in an engine's own. Elements past ``rank`` are never used: they may be
        anything, NaN included.
    scale: multiplies the update of this slice; 1 where an engine folds it into B.

    A GPU's kernels read 16 bytes at once: there ``a_offset`` (and ``d_in``) must be a multiple of 8, ``b_offset`` of
    the least of 8 and ``width``.
    """

    a_offset: int = 0
    b_offset: int = 0
    rank: int = 0
    width: int = 0
    scale: float = 1.0


class SlotTable:
    """The rows of one projection: ``tensor`` int64 [slots, slices, 4] on a device, all empty at first."""

    def __init__(self, slots: int, slices: int, device: torch.device | str = "cpu") -> None:
        if slots < 1 or not 1 <= slices <= MAX_SLICES:
            raise LoraForgeError(
                f"{slots} slots of {slices} slices", key="slices", remedy=f"give 1 to {MAX_SLICES} slices"
            )
        self.tensor = torch.zeros((slots, slices, WORDS), dtype=torch.int64, device=device)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> SlotTable:
        """A table over rows that lie elsewhere, int64 [slots, slices, 4]."""
        table = cls.__new__(cls)
        table.tensor = tensor
        return table

    @property
    def slots(self) -> int:
        return self.tensor.shape[0]

    @property
    def slices(self) -> int:
        return self.tensor.shape[1]

    def set(self, slot: int, rows: list[Slot]) -> None:
        """Write one slot, all its slices, in place. Raises LoraForgeError where a row contradicts itself."""
        if len(rows) != self.slices:
            raise LoraForgeError(
                f"{len(rows)} rows for {self.slices} slices", key=f"slot {slot}", remedy="give all"
            )
        if self.tensor.device.type != "cpu":
            for row in rows:
                _check_alignment(row)
        self.tensor[slot].copy_(torch.tensor([_words(row) for row in rows], dtype=torch.int64))

    def clear(self, slot: int) -> None:
        """Make a slot empty: tokens that name it get the base model alone."""
        self.tensor[slot].zero_()

    def row(self, slot: int, piece: int) -> Slot:
        """Read one row back (a device-to-host copy: for tests and reports)."""
        a, b, extent, scale = (int(word) for word in self.tensor[slot, piece].tolist())
        rank, width = _PAIR.unpack(_WORD.pack(extent))
        return Slot(a, b, rank, width, _SCALE.unpack(_WORD.pack(scale))[0])


def _check_alignment(row: Slot) -> None:
    b_unit = min(VECTOR, row.width)
    if row.rank and (row.a_offset % VECTOR or row.b_offset % b_unit):
        raise LoraForgeError(
            f"factors at elements {row.a_offset} and {row.b_offset}",
            key="offset",
            remedy=f"start A at a multiple of {VECTOR} and B at one of {b_unit}",
        )


def _words(row: Slot) -> tuple[int, int, int, int]:
    if row.rank < 0 or row.width < row.rank or row.width >= 1 << 31:
        raise LoraForgeError(
            f"rank {row.rank} in rows of {row.width}", key="width", remedy="give a width of at least the rank"
        )
    extent = _WORD.unpack(_PAIR.pack(row.rank, row.width))[0]
    return row.a_offset, row.b_offset, extent, _WORD.unpack(_SCALE.pack(row.scale, 0))[0]
