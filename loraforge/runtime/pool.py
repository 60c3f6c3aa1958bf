"""The ragged pool: live directions of the adapters in slots, side by side in one buffer, and nothing else.

Resident bytes follow retained ranks instead of slots times the largest rank. The buffer and the slot tables keep their
addresses for good and are refreshed in place, so that captured graphs stay valid when adapters change. Changes are
made between steps, in the order of the device's stream. Which adapter leaves a slot is the engine's to say: its
scheduler knows who is waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from loraforge.errors import LoraForgeError
from loraforge.ops.slots import WORDS, SlotTable
from loraforge.runtime.arena import Arena
from loraforge.runtime.packed import ALIGN_BYTES, Layout, Packed, stage
from loraforge.runtime.ranks import Factors, Projection

_PIECE_BYTES = 32 << 20  # of a block that is moved at once: what a move needs beside the pool


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
    """What one slot holds: its range in units, and the adapter."""

    start: int
    units: int
    adapter: Packed


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
        """Make an empty pool. A GPU's buffer is taken whole, the memory of a CPU's page by page, when directions are
        first written.

        Raises LoraForgeError for a capacity that is not positive.
        """
        self.layout = Layout(projections, dtype)
        self.slots = slots
        self.counters = Counters()
        self._unit = self.layout.unit
        self._arena = Arena(capacity_bytes // ALIGN_BYTES)
        if self._arena.capacity < 1:
            raise LoraForgeError(
                f"a pool of {capacity_bytes} bytes", key="pool_bytes", remedy="give it room for one adapter"
            )
        self.buffer = torch.empty(self._arena.capacity * self._unit, dtype=dtype, device=device)
        self._pin = self.buffer.is_cuda
        # one tensor for all projections of as many slices: the rows of one slot are then one strided copy
        self._rows = {
            slices: torch.zeros((len(names), slots, slices, WORDS), dtype=torch.int64, device=device)
            for slices, names in self.layout.groups.items()
        }
        self.tables: dict[str, SlotTable] = {}
        for slices, names in self.layout.groups.items():
            for place, name in enumerate(names):
                self.tables[name] = SlotTable.of(self._rows[slices][place])
        self._blocks: dict[int, _Block] = {}

    @property
    def capacity_bytes(self) -> int:
        return self._arena.capacity * ALIGN_BYTES

    @property
    def room_bytes(self) -> int:
        """The part of the capacity that adapters share, each as much as its ranks take."""
        return self._arena.capacity * ALIGN_BYTES

    @property
    def live_bytes(self) -> int:
        """Bytes that adapters in slots take, alignment included."""
        return (self._arena.capacity - self._arena.free) * ALIGN_BYTES

    @property
    def device_bytes(self) -> int:
        """Bytes that buffer and tables take, whatever is in them."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.buffer, *self._rows.values()))

    def report(self) -> dict[str, int]:
        """Counters and sizes, for logs and records."""
        return {
            **asdict(self.counters),
            "capacity_bytes": self.capacity_bytes,
            "live_bytes": self.live_bytes,
            "adapters": len(self._blocks),
        }

    def operands(self, name: str) -> tuple[Tensor, Tensor]:
        """What the offsets of A and of B in the table of a projection count the elements of."""
        return self.buffer, self.buffer

    def pack(self, factors: Mapping[str, Sequence[Factors | None]]) -> Packed:
        """Put an adapter into the form that :meth:`load` takes; see :meth:`Layout.pack`."""
        return self.layout.pack(factors, pin=self._pin)

    def size(self, adapter: Packed) -> int:
        """Bytes that an adapter takes of ``room_bytes``."""
        return adapter.bytes

    def load(self, slot: int, adapter: Packed) -> None:
        """Put an adapter into a slot, instead of what it held; on a GPU without waiting for it.

        Raises LoraForgeError where there is no room left; the slot is then empty.
        """
        self.clear(slot)
        data = self._kept(adapter)
        units = data.numel() // self._unit
        start = self._room(units) if units else 0
        self._blocks[slot] = _Block(start, units, adapter)
        begin = start * self._unit
        self.buffer[begin : begin + data.numel()].copy_(data, non_blocking=True)
        self._place(slot)
        self.counters.loads += 1
        self.counters.source_bytes += adapter.source_bytes

    def clear(self, slot: int) -> None:
        """Make a slot empty: tokens that name it get the base model alone."""
        block = self._blocks.pop(slot, None)
        if block is None:
            return
        for rows in self._rows.values():
            rows[:, slot].zero_()
        if block.units:
            self._arena.give(block.start, block.units)
        self.counters.unloads += 1

    def _place(self, slot: int) -> None:
        """Write the rows of a slot where its block now lies."""
        block = self._blocks[slot]
        for slices in block.adapter.rows:
            moved = self._staged(slot, slices, block.adapter, block.start * self._unit)
            self._rows[slices][:, slot].copy_(moved, non_blocking=True)

    def _kept(self, adapter: Packed) -> Tensor:
        """The part of an adapter's data that lies in its slot's block."""
        return adapter.data

    def _staged(self, slot: int, slices: int, adapter: Packed, start: int) -> Tensor:
        """Rows of a slot for the tables with so many slices, on the host, for a block that starts at an element."""
        return stage(adapter.rows[slices], start, pin=self._pin)

    def _room(self, units: int) -> int:
        start = self._arena.take(units)
        if start is None and self._arena.free >= units:
            self._pack()
            start = self._arena.take(units)
        if start is None:
            raise LoraForgeError(
                f"the pool of {self.capacity_bytes} bytes has {self._arena.free * ALIGN_BYTES} left, "
                f"and an adapter needs {units * ALIGN_BYTES}",
                key="pool_bytes",
                remedy="give the pool more bytes or the engine fewer slots",
            )
        return start

    def _pack(self) -> None:
        """Move all blocks to the front, in their order, so that what is free is one range."""
        used = 0
        for slot, block in sorted(self._blocks.items(), key=lambda item: item[1].start):
            if not block.units:
                continue
            if block.start != used:
                self._move(block.start * self._unit, used * self._unit, block.units * self._unit)
                block.start = used
                self._place(slot)
            used += block.units
        self._arena.pack(used)
        self.counters.moves += 1

    def _move(self, source: int, target: int, elements: int) -> None:
        """Move elements towards the front, a piece at a time: the two ranges may overlap."""
        most = max(_PIECE_BYTES // self.buffer.element_size(), 1)
        for done in range(0, elements, most):
            size = min(most, elements - done)
            piece = self.buffer[source + done : source + done + size].clone()
            self.buffer[target + done : target + done + size] = piece
