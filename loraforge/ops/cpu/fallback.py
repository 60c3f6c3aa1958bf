"""The operations in plain torch, an adapter at a time, for machines without a compiler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from loraforge.ops.plan import Plan
from loraforge.ops.slots import Slot, SlotTable


def fill(plan: Plan, slots: int) -> None:
    """Fill ``plan`` from its ``token_slots``; see :func:`loraforge.ops.cpu.fill`."""
    routing = plan.token_slots.long()
    tokens = torch.nonzero((routing >= 0) & (routing < slots)).flatten()
    order = tokens[torch.argsort(routing[tokens], stable=True)]
    plan.order[: len(order)] = order
    begin, made = 0, 0
    for slot, rows in enumerate(torch.bincount(routing[tokens], minlength=slots).tolist()):
        for start in range(0, rows, plan.tile):
            plan.segments[made] = torch.tensor((begin + start, min(plan.tile, rows - start), slot, 0))
            made += 1
        begin += rows
    plan.count.fill_(made)


def shrink(x: Tensor, a: Tensor, table: Tensor, plan: Plan, z: Tensor) -> None:
    """Live entries of ``z``; see :func:`loraforge.ops.cpu.shrink`."""
    for tokens, rows in _groups(table, plan):
        mine = x[tokens].float()
        for piece, row in enumerate(rows):
            if row.rank:
                z[0, tokens, piece, : row.rank] = (
                    mine @ _rows(a, row.a_offset, row.rank, x.shape[1]).float().T
                )


def expand(
    z: Tensor, b: Tensor, table: Tensor, plan: Plan, y: Tensor, slices: Sequence[tuple[int, int]]
) -> None:
    """``y`` += scale Z B^T; see :func:`loraforge.ops.cpu.expand`."""
    for tokens, rows in _groups(table, plan):
        for piece, ((first, channels), row) in enumerate(zip(slices, rows, strict=True)):
            if row.rank:
                factor = _rows(b, row.b_offset, channels, row.width)[:, : row.rank].float()
                update = z[0, tokens, piece, : row.rank] @ factor.T
                end = first + channels
                y[tokens, first:end] = (y[tokens, first:end].float() + row.scale * update).to(y.dtype)


def _groups(table: Tensor, plan: Plan) -> Iterator[tuple[Tensor, list[Slot]]]:
    """The tokens of each segment, and the rows of their slot."""
    view = SlotTable(1, table.shape[1])
    view.tensor = table
    for start, rows, slot, _ in plan.segments[: int(plan.count)].tolist():
        yield (
            plan.order[start : start + rows].long(),
            [view.row(slot, piece) for piece in range(view.slices)],
        )


def _rows(operand: Tensor, offset: int, rows: int, width: int) -> Tensor:
    """[rows, width] that lie one after another from the element at ``offset``."""
    return operand.as_strided((rows, width), (width, 1), operand.storage_offset() + offset)
