"""The ragged pool: live directions of the adapters in slots, side by side in one buffer, and nothing else.

Resident bytes follow retained ranks instead of slots times the largest rank. The buffer and the slot tables keep their
addresses for good and are refreshed in place, so that captured graphs stay valid when adapters change. Changes are
made between steps, in the order of the device's stream. Which adapter leaves a slot is the engine's to say: its
scheduler knows who is waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from loraforge.errors import LoraForgeError
from loraforge.ops.slots import Slot, SlotTable, bucket
from loraforge.runtime.arena import Arena
from loraforge.runtime.ranks import Factors, Projection

ALIGN_BYTES = 64  # a cache line; more than any kernel's loads


@dataclass
class Counters:
    """What a pool has done since it was made.

    loads: adapters that were put into a slot. unloads: adapters that left one. source_bytes: bytes of live directions
    that were copied in. moves: times that the buffer was packed to make room.
    """

    loads: int = 0
    unloads: int = 0
    source_bytes: int = 0
    moves: int = 0


@dataclass
class _Block:
    """What one slot holds for one projection: its range in units, and its rows of the table."""

    start: int
    units: int
    rows: list[Slot]


def block_bytes(projection: Projection, ranks: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes that one projection of an adapter takes in a pool, for the live rank of each slice (0 for none)."""
    return _lay_out(projection, ranks, ALIGN_BYTES // dtype.itemsize)[1] * ALIGN_BYTES


def _lay_out(projection: Projection, ranks: Sequence[int], unit: int) -> tuple[list[Slot], int]:
    """Rows of the table for a block that starts at element 0, and how many units of elements it takes."""
    rows, units = [], 0
    for rank, channels in zip(ranks, projection.channels, strict=True):
        if not rank:
            rows.append(Slot())
            continue
        width = bucket(rank)
        between = units + _ceil(rank * projection.d_in, unit)
        rows.append(Slot(units * unit, between * unit, rank, width))
        units = between + _ceil(channels * width, unit)
    return rows, units


def _ceil(elements: int, unit: int) -> int:
    return -(-elements // unit)


class RaggedPool:
    """Directions of up to ``slots`` adapters for ``projections``.

    buffer: [elements] of ``dtype``: both operands of every op. tables: projection name -> its slot table.
    """

    def __init__(
        self,
        projections: Iterable[Projection],
        slots: int,
        capacity_bytes: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Make an empty pool. The memory of a CPU's buffer is taken page by page, when directions are first written.

        Raises LoraForgeError for a capacity that is not positive.
        """
        self.projections = {projection.name: projection for projection in projections}
        self.slots = slots
        self.counters = Counters()
        self._unit = ALIGN_BYTES // dtype.itemsize  # elements
        self._arena = Arena(capacity_bytes // ALIGN_BYTES)
        if self._arena.capacity < 1:
            raise LoraForgeError(
                f"a pool of {capacity_bytes} bytes", key="pool_bytes", remedy="give it room for one adapter"
            )
        self.buffer = torch.empty(self._arena.capacity * self._unit, dtype=dtype, device=device)
        self.tables = {
            name: SlotTable(slots, len(projection.channels), device)
            for name, projection in self.projections.items()
        }
        self._blocks: dict[tuple[int, str], _Block] = {}

    @property
    def capacity_bytes(self) -> int:
        return self._arena.capacity * ALIGN_BYTES

    @property
    def live_bytes(self) -> int:
        """Bytes that adapters in slots take, alignment included."""
        return (self._arena.capacity - self._arena.free) * ALIGN_BYTES

    def report(self) -> dict[str, int]:
        """Counters and sizes, for logs and records."""
        return {
            **asdict(self.counters),
            "capacity_bytes": self.capacity_bytes,
            "live_bytes": self.live_bytes,
            "adapters": len({slot for slot, _ in self._blocks}),
        }

    def write(self, slot: int, name: str, factors: Sequence[Factors | None]) -> None:
        """Put an adapter's directions for one projection into a slot, instead of what it held.

        factors: for each slice A [rank, d_in] and B [channels, rank], live directions alone, of any float dtype and on
        any device, or None.

        Raises LoraForgeError where the shapes are not the projection's, or there is no room left; the slot then holds
        nothing for this projection.
        """
        projection = self.projections[name]
        self.erase(slot, name)
        if len(factors) != len(projection.channels):
            self._misfit(name, f"{len(factors)} slices")
        for pair, channels in zip(factors, projection.channels, strict=True):
            if pair is not None and (
                pair[0].shape[1] != projection.d_in or pair[1].shape != (channels, pair[0].shape[0])
            ):
                self._misfit(name, f"A {list(pair[0].shape)} and B {list(pair[1].shape)}")
        places, units = _lay_out(
            projection, [0 if pair is None else len(pair[0]) for pair in factors], self._unit
        )
        if not units:
            return
        start = self._room(units, name)
        rows = [
            replace(
                row, a_offset=row.a_offset + start * self._unit, b_offset=row.b_offset + start * self._unit
            )
            for row in places
        ]
        for pair, row, channels in zip(factors, rows, projection.channels, strict=True):
            if pair is not None:
                a, b = pair
                self.buffer[row.a_offset : row.a_offset + a.numel()].view(a.shape).copy_(a)
                target = self.buffer[row.b_offset : row.b_offset + channels * row.width]
                target.view(channels, row.width)[:, : row.rank].copy_(b)
                self.counters.source_bytes += (a.numel() + b.numel()) * self.buffer.itemsize
        self._blocks[slot, name] = _Block(start, units, rows)
        self.tables[name].set(slot, rows)

    def erase(self, slot: int, name: str) -> None:
        """Make a slot empty for one projection."""
        block = self._blocks.pop((slot, name), None)
        if block is not None:
            self.tables[name].clear(slot)
            self._arena.give(block.start, block.units)

    def clear(self, slot: int) -> None:
        """Make a slot empty: tokens that name it get the base model alone."""
        for name in self.projections:
            self.erase(slot, name)

    def _room(self, units: int, name: str) -> int:
        start = self._arena.take(units)
        if start is None and self._arena.free >= units:
            self._pack()
            start = self._arena.take(units)
        if start is None:
            raise LoraForgeError(
                f"the pool of {self.capacity_bytes} bytes has {self._arena.free * ALIGN_BYTES} left, "
                f"and {name} needs {units * ALIGN_BYTES}",
                key="pool_bytes",
                remedy="give the pool more bytes or the engine fewer slots",
            )
        return start

    def _pack(self) -> None:
        """Move all blocks to the front, in their order, so that what is free is one range."""
        used = 0
        for (slot, name), block in sorted(self._blocks.items(), key=lambda item: item[1].start):
            if block.start != used:
                shift = (block.start - used) * self._unit
                begin, size = used * self._unit, block.units * self._unit
                # the two ranges may overlap
                self.buffer[begin : begin + size] = self.buffer[begin + shift : begin + shift + size].clone()
                block.rows = [
                    replace(row, a_offset=row.a_offset - shift, b_offset=row.b_offset - shift)
                    if row.rank
                    else row
                    for row in block.rows
                ]
                block.start = used
                self.tables[name].set(slot, block.rows)
            used += block.units
        self._arena.pack(used)
        self.counters.moves += 1

    def _misfit(self, name: str, found: str) -> None:
        projection = self.projections[name]
        raise LoraForgeError(
            f"{found} for {projection.d_in} inputs and {projection.channels} outputs",
            key=name,
            remedy="load an adapter of this base model",
        )
