"""Rank-aware segmented shrink for prefill: Z = X A^T on tensor cores, no work for dead directions (paper, section 5).

A program takes up to BLOCK_M rows of one segment and one plane of the input dimension. The live directions of all
slices are lined up behind one another, so that rank 8 in each of q, k and v is one block of 24 columns and X is read
once; the rank that bounds the columns is read on the device, before the loop over the input.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# What is jitted is Triton's language, not Python's.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from loraforge.errors import LoraForgeError
from loraforge.ops.plan import Plan
from loraforge.ops.slots import VECTOR
from loraforge.ops.triton.launch import height, launch


@triton.jit
def _columns(
    x,
    a,
    z,
    live,
    first,
    end0,
    end1,
    end2,
    a0,
    a1,
    a2,
    d_in,
    begin,
    end,
    CAPACITY: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Columns ``first`` to ``first + BLOCK_N`` of the lined-up directions, over inputs ``begin`` to ``end``.

    x: pointers [BLOCK_M] to the rows' first elements; z: pointers to their place in this plane.
    """
    column = first + tl.arange(0, BLOCK_N)
    column_live = column < end2
    # where each direction starts in A, and where its product goes in a row of Z
    source = a0 + column.to(tl.int64) * d_in
    target = column
    if SLICES > 1:
        source = tl.where(column < end0, source, a1 + (column - end0).to(tl.int64) * d_in)
        target = tl.where(column < end0, target, CAPACITY + column - end0)
    if SLICES > 2:
        source = tl.where(column < end1, source, a2 + (column - end1).to(tl.int64) * d_in)
        target = tl.where(column < end1, target, 2 * CAPACITY + column - end1)
    source = tl.multiple_of(tl.where(column_live, source, 0), 8)
    k = tl.arange(0, BLOCK_K)
    acc = tl.full((BLOCK_M, BLOCK_N), 0.0, dtype=tl.float32)
    for start in tl.range(begin, end, BLOCK_K):
        if EVEN:
            x_mask = live[:, None]
            a_mask = column_live[None, :]
        else:
            x_mask = live[:, None] & (start + k < d_in)[None, :]
            a_mask = column_live[None, :] & (start + k < d_in)[:, None]
        left = tl.load(x[:, None] + (start + k)[None, :], mask=x_mask, other=0.0)
        right = tl.load(a + source[None, :] + (start + k)[:, None], mask=a_mask, other=0.0)
        acc = tl.dot(left, right, acc)
    tl.store(z[:, None] + target[None, :], acc, mask=live[:, None] & column_live[None, :])


@triton.jit(do_not_specialize=["tokens"])  # what changes with the batch compiles nothing anew
def _shrink(
    x,
    x_stride,
    a,
    table,
    order,
    segments,
    count,
    z,
    tokens,
    d_in,
    TILE: tl.constexpr,
    SLICES: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid: (segment capacity * TILE / BLOCK_M, planes, column programs)."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    PARTS: tl.constexpr = TILE // BLOCK_M
    segment = tl.program_id(0) // PARTS
    skip = tl.program_id(0) % PARTS * BLOCK_M
    segments += segment * 4
    # read before it is known whether the segment is live, to wait for memory once
    place = tl.load(segments) + skip
    height = tl.load(segments + 1) - skip
    slot = tl.load(segments + 2)
    if segment >= tl.load(count):
        return
    if height <= 0:
        return
    table += slot.to(tl.int64) * (SLICES * 4)
    a0 = tl.load(table)
    end0 = tl.load(table + 2).to(tl.int32)  # the low half of rank | width << 32
    end1 = end0
    a1 = a0
    if SLICES > 1:
        a1 = tl.load(table + 4)
        end1 = end0 + tl.load(table + 6).to(tl.int32)
    end2 = end1
    a2 = a0
    if SLICES > 2:
        a2 = tl.load(table + 8)
        end2 = end1 + tl.load(table + 10).to(tl.int32)
    if end2 == 0:
        return
    m = tl.arange(0, BLOCK_M)
    live = m < height
    rows = tl.load(order + place + m, mask=live, other=0).to(tl.int64)
    plane = tl.program_id(1)
    z += (plane.to(tl.int64) * tokens + rows) * (SLICES * CAPACITY)
    x += rows * x_stride
    steps = (d_in + BLOCK_K - 1) // BLOCK_K
    begin = plane * steps // tl.num_programs(1) * BLOCK_K
    end = tl.minimum((plane + 1) * steps // tl.num_programs(1) * BLOCK_K, d_in)
    lane = tl.program_id(2)
    if (end2 <= NARROW) | (SLICES * CAPACITY <= NARROW):
        if lane == 0:
            _columns(
                x, a, z, live, 0, end0, end1, end2, a0, a1, a2, d_in, begin, end,
                CAPACITY, SLICES, BLOCK_M, NARROW, BLOCK_K, EVEN,
            )  # fmt: skip
    else:
        for first in range(lane * BLOCK_N, end2, tl.num_programs(2) * BLOCK_N):
            _columns(
                x, a, z, live, first, end0, end1, end2, a0, a1, a2, d_in, begin, end,
                CAPACITY, SLICES, BLOCK_M, BLOCK_N, BLOCK_K, EVEN,
            )  # fmt: skip


def shrink(
    x: Tensor,
    a: Tensor,
    table: Tensor,
    plan: Plan,
    z: Tensor,
    block_m: int = 0,
    narrow: int = 0,
    block_n: int = 0,
    block_k: int = 0,
    columns: int = 0,
    warps: int = 0,
    stages: int = 0,
    registers: int = 0,
    early: int = 0,
) -> None:
    """:func:`loraforge.ops.shrink` on operands that it has checked; an option of 0 takes the default.

    block_m: rows a program, a divisor of the plan's tile. narrow: columns of the block that runs where all live
    directions of a slot fit into it; block_n: columns of each block where they do not; columns: programs that share
    those blocks. block_k: inputs a step. warps, stages: of a program; registers: at most so many a
    thread. early: 1 to start while the kernel before ends.
    """
    block_m = height(plan.tile, block_m or 64)
    narrow, block_n, block_k = narrow or 32, block_n or 64, block_k or 128
    planes, tokens, slices, capacity = z.shape
    d_in = x.shape[1]
    if d_in % VECTOR:
        raise LoraForgeError(
            f"{d_in} inputs", key="x", remedy=f"pad the projection's inputs to a multiple of {VECTOR}"
        )
    with torch.cuda.device_of(x):
        _shrink[plan.segment_capacity * (plan.tile // block_m), planes, columns or 1](
            x,
            x.stride(0),
            a,
            table,
            plan.order,
            plan.segments,
            plan.count,
            z,
            tokens,
            d_in,
            TILE=plan.tile,
            SLICES=slices,
            CAPACITY=capacity,
            BLOCK_M=block_m,
            NARROW=narrow,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            EVEN=d_in % block_k == 0,
            EARLY=bool(early),
            **launch(warps or 4, stages or 3, registers, early),
        )
