"""The paper's pool (section 5, A.2): an engine's own buffers at full rank, and beside them a compact B.

A is read where the engine has it: its rows are contiguous, however many there are. The rows of the engine's B are as
wide as the largest rank, so B is kept a second time, in rows as wide as each adapter's bucket. The engine's kernels can
still run any projection (:meth:`ShadowPool.native`); the compact B is memory on top of what the engine takes anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from loraforge.errors import LoraForgeError
from loraforge.ops.slots import Slot, SlotTable
from loraforge.runtime.packed import Packed, live, stage
from loraforge.runtime.pool import RaggedPool
from loraforge.runtime.ranks import Projection

Stacked = tuple[Tensor, ...]


def native_bytes(projections: Iterable[Projection], slots: int, rank: int, dtype: torch.dtype) -> int:
    """Bytes of an engine's buffers for ``slots`` adapters of up to ``rank`` directions."""
    elements = sum(len(its.channels) * its.d_in + sum(its.channels) for its in projections)
    return slots * rank * elements * dtype.itemsize


class ShadowPool(RaggedPool):
    """A ragged pool of B alone, whose A lies in buffers of the engine's shape.

    buffer: the compact B. The engine's buffers take the same adapters, with zeros past the rank of each.
    """

    def __init__(
        self,
        projections: Iterable[Projection],
        slots: int,
        rank: int,
        capacity_bytes: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Make an empty pool. rank: the largest that an adapter may have. capacity_bytes: of the engine's buffers and
        the compact B together.

        Raises LoraForgeError where the engine's buffers leave no room for a compact B.
        """
        projections = list(projections)
        self.rank = rank
        self.native_bytes = native_bytes(projections, slots, rank, dtype)
        if capacity_bytes <= self.native_bytes:
            raise LoraForgeError(
                f"a pool of {capacity_bytes} bytes, of which {slots} slots of rank {rank} take {self.native_bytes} "
                "before any compact B",
                key="pool_bytes",
                remedy="give the pool more bytes, or the engine fewer slots or a smaller largest rank",
            )
        super().__init__(projections, slots, capacity_bytes - self.native_bytes, dtype, device)
        self._a: dict[str, Tensor] = {}
        self._b: dict[str, Stacked] = {}
        for name, its in self.layout.projections.items():
            # all slices in one tensor, so that one address and an offset reach them
            shape = (len(its.channels), slots, 1, rank, its.d_in)
            self._a[name] = torch.zeros(shape, dtype=dtype, device=device)
            self._b[name] = tuple(
                torch.zeros((slots, 1, channels, rank), dtype=dtype, device=device)
                for channels in its.channels
            )

    @property
    def capacity_bytes(self) -> int:
        return super().capacity_bytes + self.native_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes that adapters take: all of the engine's buffers, and the compact B of those in slots."""
        return super().live_bytes + self.native_bytes

    @property
    def device_bytes(self) -> int:
        return super().device_bytes + self.native_bytes

    def report(self) -> dict[str, int]:
        return {**super().report(), "native_bytes": self.native_bytes}

    def operands(self, name: str) -> tuple[Tensor, Tensor]:
        return self._a[name], self.buffer

    def native(self, name: str) -> tuple[Stacked, Stacked]:
        """A [slots, 1, rank, d_in] and B [slots, 1, channels, rank] of each slice: what the engine's kernels take."""
        return tuple(self._a[name].unbind()), self._b[name]

    def size(self, adapter: Packed) -> int:
        return self._kept(adapter).nbytes

    def load(self, slot: int, adapter: Packed) -> None:
        most = max((max(its) for its in adapter.ranks.values()), default=0)
        if most > self.rank:
            raise LoraForgeError(
                f"an adapter of rank {most} for slots of {self.rank}",
                key="rank",
                remedy="give the engine a larger largest rank",
            )
        super().load(slot, adapter)
        shift = self._blocks[slot].start * self._unit - adapter.b_start
        for name, piece, row in self._directions(adapter):
            a = adapter.data[row.a_offset : row.a_offset + row.rank * self._a[name].shape[-1]]
            self._a[name][piece, slot, 0, : row.rank].copy_(a.view(row.rank, -1), non_blocking=True)
            # from the compact one, on the device: a copy into parts of rows would have to wait for the host
            target = self._b[name][piece][slot, 0]
            first = row.b_offset + shift
            b = self.buffer[first : first + len(target) * row.width].view(-1, row.width)
            target[:, : row.rank].copy_(b[:, : row.rank])

    def clear(self, slot: int) -> None:
        block = self._blocks.get(slot)
        super().clear(slot)
        if block is not None:
            # the engine's kernels run over all rows
            for name, piece, row in self._directions(block.adapter):
                self._a[name][piece, slot, 0, : row.rank].zero_()
                self._b[name][piece][slot, 0, :, : row.rank].zero_()

    def _directions(self, adapter: Packed) -> Iterator[tuple[str, int, Slot]]:
        """(projection, slice, its row in ``adapter``) of all that an adapter changes."""
        for slices, names in self.layout.groups.items():
            table = SlotTable.of(adapter.rows[slices])
            for place, name in enumerate(names):
                for piece, rank in enumerate(adapter.ranks.get(name, ())):
                    if rank:
                        yield name, piece, table.row(place, piece)

    def _kept(self, adapter: Packed) -> Tensor:
        return adapter.data[adapter.b_start :]

    def _staged(self, slot: int, slices: int, adapter: Packed, start: int) -> Tensor:
        moved = stage(adapter.rows[slices], start - adapter.b_start, pin=self._pin)
        strides = [self.rank * self.layout.projections[name].d_in for name in self.layout.groups[slices]]
        begins = torch.tensor(strides)[:, None] * (torch.arange(slices) * self.slots + slot)
        moved[..., 0] = begins * live(moved)
        return moved
