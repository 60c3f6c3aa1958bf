"""Shrink and expand as they are defined, in FP64, a token and a slice at a time: the oracle of every backend."""

from __future__ import annotations

import torch
from torch import Tensor

from loraforge.ops.slots import SlotTable


def shrink(x: Tensor, a: Tensor, table: SlotTable, token_slots: Tensor, capacity: int) -> Tensor:
    """Z FP64 [T, slices, capacity] = X A^T for ``x`` [T, d_in]; what is not live is NaN.

    ``a``: any tensor; offsets in the table count its elements.
    """
    tokens, d_in = x.shape
    flat = a.reshape(-1)
    z = torch.full((tokens, table.slices, capacity), torch.nan, dtype=torch.float64)
    for token, slot in enumerate(token_slots.tolist()):
        for piece in range(table.slices if slot >= 0 else 0):
            row = table.row(slot, piece)
            factor = flat[row.a_offset : row.a_offset + row.rank * d_in].reshape(row.rank, d_in)
            z[token, piece, : row.rank] = factor.double().cpu() @ x[token].double().cpu()
    return z


def expand(
    z: Tensor, b: Tensor, table: SlotTable, token_slots: Tensor, y: Tensor, slices: list[tuple[int, int]]
) -> Tensor:
    """FP64 [T, d_out]: ``y`` + scale Z B^T, slice by slice, for ``z`` [T, slices, capacity].

    ``slices``: (first output channel, channels) of each slice within the columns of ``y``.
    """
    flat, out = b.reshape(-1), y.double().cpu()
    for token, slot in enumerate(token_slots.tolist()):
        for piece, (first, channels) in enumerate(slices if slot >= 0 else []):
            row = table.row(slot, piece)
            factor = flat[row.b_offset : row.b_offset + channels * row.width].reshape(channels, row.width)
            live = factor[:, : row.rank].double().cpu()
            out[token, first : first + channels] += row.scale * (
                live @ z[token, piece, : row.rank].double().cpu()
            )
    return out
