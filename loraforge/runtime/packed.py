"""Adapters as a pool takes them: live directions in one block of host memory, and their rows of every slot table.

Made once, when an adapter is registered: which directions are live is looked at then, on the host, so that putting
the adapter into a slot is one copy of its block and one of its rows, whatever the number of layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraforge.errors import LoraForgeError
from loraforge.ops.slots import Slot, SlotTable, bucket
from loraforge.runtime.ranks import Factors, Projection

ALIGN_BYTES = 64  # a cache line; more than any kernel's loads


@dataclass(frozen=True)
class Packed:
    """One adapter.

    data: [elements] of the pool's dtype, on the host: all A, and from element ``b_start`` on all B. rows: number of
    slices -> int64 [projections with so many, slices, 4], rows of their tables, offsets counted from the first element
    of ``data``. ranks: live rank of each slice of the projections that the adapter changes. source_bytes: of its live
    directions, without alignment.
    """

    data: Tensor
    b_start: int
    rows: Mapping[int, Tensor]
    ranks: Mapping[str, tuple[int, ...]]
    source_bytes: int

    @property
    def bytes(self) -> int:
        """What the adapter takes in a pool."""
        return self.data.numel() * self.data.element_size()


class Layout:
    """Projections in their order, grouped by the number of their slices: ``places`` says which row of which group."""

    def __init__(self, projections: Iterable[Projection], dtype: torch.dtype) -> None:
        self.projections = {projection.name: projection for projection in projections}
        self.dtype = dtype
        self.unit = ALIGN_BYTES // dtype.itemsize  # elements
        self.groups: dict[int, list[str]] = {}
        for name, projection in self.projections.items():
            self.groups.setdefault(len(projection.channels), []).append(name)

    def bytes(self, ranks: Mapping[str, Sequence[int]]) -> int:
        """What an adapter of these live ranks a slice takes in a pool."""
        return sum(self.sizes(ranks))

    def sizes(self, ranks: Mapping[str, Sequence[int]]) -> tuple[int, int]:
        """Bytes of A and of B of an adapter of these live ranks a slice."""
        a = b = 0
        for name, its in ranks.items():
            _, a, b = _lay_out(self.projections[name], its, self.unit, a, b)
        return a * ALIGN_BYTES, b * ALIGN_BYTES

    def pack(self, factors: Mapping[str, Sequence[Factors | None]], *, pin: bool = False) -> Packed:
        """Put an adapter into one block.

        factors: projection -> for each slice A [rank, d_in] and B [channels, rank], live directions alone, of any
        float dtype and on any device, or None. pin: whether the block is page-locked, for a GPU to copy from.

        Raises LoraForgeError where a projection is not known or the shapes are not its own.
        """
        for name, pairs in factors.items():
            self._check(name, pairs)
        ranks = {
            name: tuple(0 if pair is None else len(pair[0]) for pair in pairs)
            for name, pairs in factors.items()
        }
        ranks = {name: its for name, its in ranks.items() if any(its)}
        empty = {slices: SlotTable(len(names), slices) for slices, names in self.groups.items()}
        a_units = b_units = 0
        placed: list[tuple[Slot, int, Factors]] = []
        for slices, names in self.groups.items():
            for place, name in enumerate(names):
                if name not in ranks:
                    continue
                projection = self.projections[name]
                rows, a_units, b_units = _lay_out(projection, ranks[name], self.unit, a_units, b_units)
                empty[slices].set(place, rows)
                for row, pair, channels in zip(rows, factors[name], projection.channels, strict=True):
                    if pair is not None and row.rank:
                        placed.append((row, channels, pair))
        b_start = a_units * self.unit
        data = torch.empty(b_start + b_units * self.unit, dtype=self.dtype, pin_memory=pin)
        elements = 0
        for row, channels, (a, b) in placed:
            data[row.a_offset : row.a_offset + a.numel()].view(a.shape).copy_(a)
            first = b_start + row.b_offset
            target = data[first : first + channels * row.width].view(channels, row.width)
            target[:, : row.rank].copy_(b)
            elements += a.numel() + b.numel()
        for table in empty.values():
            table.tensor[..., 1] += b_start * live(table.tensor)
        return Packed(
            data,
            b_start,
            {slices: table.tensor for slices, table in empty.items()},
            ranks,
            elements * self.dtype.itemsize,
        )

    def _check(self, name: str, pairs: Sequence[Factors | None]) -> None:
        projection = self.projections.get(name)
        if projection is None:
            raise LoraForgeError("no such projection", key=name, remedy="load an adapter of this base model")
        found = None
        if len(pairs) != len(projection.channels):
            found = f"{len(pairs)} slices"
        else:
            for pair, channels in zip(pairs, projection.channels, strict=True):
                if pair is None:
                    continue
                a, b = pair
                if a.shape[1] != projection.d_in or b.shape != (channels, len(a)):
                    found = f"A {list(a.shape)} and B {list(b.shape)}"
        if found:
            raise LoraForgeError(
                f"{found} for {projection.d_in} inputs and {projection.channels} outputs",
                key=name,
                remedy="load an adapter of this base model",
            )


def _lay_out(
    projection: Projection, ranks: Sequence[int], unit: int, a_units: int, b_units: int
) -> tuple[list[Slot], int, int]:
    """Rows of the table of a projection whose A begins at ``a_units`` units of elements and whose B at ``b_units``, and
    where those of the next one begin."""
    rows = []
    for rank, channels in zip(ranks, projection.channels, strict=True):
        if not rank:
            rows.append(Slot())
            continue
        width = bucket(rank)
        rows.append(Slot(a_units * unit, b_units * unit, rank, width))
        a_units += _ceil(rank * projection.d_in, unit)
        b_units += _ceil(channels * width, unit)
    return rows, a_units, b_units


def live(rows: Tensor) -> Tensor:
    """1 for the rows of tables [..., 4] that hold directions, 0 for the empty ones; [...] of their dtype."""
    return (rows[..., 2] != 0).to(rows.dtype)


def _ceil(elements: int, unit: int) -> int:
    return -(-elements // unit)


def stage(rows: Tensor, start: int, *, pin: bool) -> Tensor:
    """A copy of the rows of a :class:`Packed` whose block starts at element ``start`` of a pool; empty rows stay."""
    moved = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=pin)
    moved.copy_(rows)
    shift = start * live(rows)
    moved[..., 0] += shift
    moved[..., 1] += shift
    return moved
