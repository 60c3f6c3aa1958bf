"""Rank-aware expand for prefill on tensor cores: Y += scale Z B^T, bound by the traffic of Y (paper, section 5).

A program keeps up to BLOCK_M rows of one segment's Z in registers, summed over planes, and walks over a few blocks of
output channels. The rank picks the depth of the product on the device: 16 for small ranks, WIDE for the rest, and a
loop over pieces of WIDE beyond that.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
# What is jitted is Triton's language, not Python's.

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from loraforge.ops.plan import Plan
from loraforge.ops.triton.launch import launch


@triton.jit
def _inner(
    z, live, first, rank, plane_stride, CAPACITY: tl.constexpr, PLANES: tl.constexpr, DEPTH: tl.constexpr
):
    """Z [BLOCK_M, DEPTH] from direction ``first``, planes summed, zero past the rank."""
    k = first + tl.arange(0, DEPTH)
    # whole vectors within the row are read, whatever lies past the rank, and then dropped
    mask = live[:, None] & (k < CAPACITY)[None, :]
    total = tl.load(z[:, None] + k[None, :], mask=mask, other=0.0)
    for plane in tl.static_range(1, PLANES):
        total += tl.load(z[:, None] + (plane * plane_stride + k)[None, :], mask=mask, other=0.0)
    return tl.where(k[None, :] < rank, total, 0.0)


@triton.jit
def _factor(b, source, width, channel_live, first, rank, DEPTH: tl.constexpr):
    """B^T [DEPTH, BLOCK_N] from direction ``first``; rows start at ``source``, zero past the rank."""
    k = first + tl.arange(0, DEPTH)
    if width % 8 == 0:
        whole = tl.multiple_of(width, 8)
        source = tl.multiple_of(source, 8)
        part = tl.load(
            b + source[None, :] + k[:, None],
            mask=channel_live[None, :] & (k < whole)[:, None],
            other=0.0,
        )
    else:
        part = tl.load(
            b + source[None, :] + k[:, None],
            mask=channel_live[None, :] & (k < rank)[:, None],
            other=0.0,
        )
    return tl.where(k[:, None] < rank, part, 0.0)


@triton.jit
def _blocks(
    z,
    plane_stride,
    b,
    b_offset,
    rank,
    width,
    scale,
    y,
    live,
    begin,
    channels,
    CAPACITY: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    DEPTH: tl.constexpr,
    LONG: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """``BLOCKS`` blocks of channels from ``begin``; z, y: pointers [BLOCK_M] to rows."""
    inner = _inner(z, live, 0, rank, plane_stride, CAPACITY, PLANES, DEPTH).to(OPERAND)
    for block in tl.range(0, BLOCKS):
        channel = begin + block * BLOCK_N + tl.arange(0, BLOCK_N)
        channel_live = channel < channels
        place = y[:, None] + channel[None, :]
        mask = live[:, None] & channel_live[None, :]
        base = tl.load(place, mask=mask, other=0.0)
        source = b_offset + channel.to(tl.int64) * width
        delta = tl.dot(
            inner, _factor(b, source, width, channel_live, 0, rank, DEPTH).to(OPERAND), input_precision="tf32"
        )
        if LONG:
            for first in range(DEPTH, rank, DEPTH):
                more = _inner(z, live, first, rank, plane_stride, CAPACITY, PLANES, DEPTH).to(OPERAND)
                delta = tl.dot(
                    more,
                    _factor(b, source, width, channel_live, first, rank, DEPTH).to(OPERAND),
                    delta,
                    input_precision="tf32",
                )
        tl.store(place, (base.to(tl.float32) + scale * delta).to(base.dtype), mask=mask)


@triton.jit
def _expand(
    z,
    plane_stride,
    b,
    table,
    order,
    segments,
    count,
    y,
    y_stride,
    first0,
    channels0,
    first1,
    channels1,
    first2,
    channels2,
    TILE: tl.constexpr,
    SLICES: tl.constexpr,
    CAPACITY: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    NARROW: tl.constexpr,
    WIDE: tl.constexpr,
    OPERAND: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid: (groups of BLOCKS * BLOCK_N channels, slice by slice; segment capacity * TILE / BLOCK_M)."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    PARTS: tl.constexpr = TILE // BLOCK_M
    GROUP: tl.constexpr = BLOCKS * BLOCK_N
    segment = tl.program_id(1) // PARTS
    skip = tl.program_id(1) % PARTS * BLOCK_M
    segments += segment * 4
    # read before it is known whether the segment is live, to wait for memory once
    start = tl.load(segments) + skip
    height = tl.load(segments + 1) - skip
    slot = tl.load(segments + 2)
    if segment >= tl.load(count):
        return
    if height <= 0:
        return
    m = tl.arange(0, BLOCK_M)
    live = m < height
    rows = tl.load(order + start + m, mask=live, other=0).to(tl.int64)

    group = tl.program_id(0)
    groups0 = (channels0 + GROUP - 1) // GROUP
    groups1 = (channels1 + GROUP - 1) // GROUP
    # a select keeps what is known of both sides' alignment, which a branch would not
    in1 = (group >= groups0) & (SLICES > 1)
    in2 = (group >= groups0 + groups1) & (SLICES > 2)
    piece = in1.to(tl.int32) + in2.to(tl.int32)
    group -= tl.where(in2, groups0 + groups1, tl.where(in1, groups0, 0))
    first = tl.where(in2, first2, tl.where(in1, first1, first0))
    channels = tl.where(in2, channels2, tl.where(in1, channels1, channels0))

    table += (slot.to(tl.int64) * SLICES + piece) * 4
    b_offset = tl.load(table + 1)
    extent = tl.load(table + 2)
    scale = tl.load(table + 3).to(tl.int32).to(tl.float32, bitcast=True)
    rank = extent.to(tl.int32)
    width = (extent >> 32).to(tl.int32)
    if rank == 0:
        return
    z += rows * (SLICES * CAPACITY) + piece * CAPACITY
    y += rows * y_stride + first
    begin = group * GROUP
    if rank <= NARROW:
        _blocks(
            z, plane_stride, b, b_offset, rank, width, scale, y, live, begin, channels,
            CAPACITY, PLANES, BLOCK_N, BLOCKS, NARROW, False, OPERAND,
        )  # fmt: skip
    elif CAPACITY > NARROW:
        if rank <= WIDE:
            _blocks(
                z, plane_stride, b, b_offset, rank, width, scale, y, live, begin, channels,
                CAPACITY, PLANES, BLOCK_N, BLOCKS, WIDE, False, OPERAND,
            )  # fmt: skip
        elif CAPACITY > WIDE:
            _blocks(
                z, plane_stride, b, b_offset, rank, width, scale, y, live, begin, channels,
                CAPACITY, PLANES, BLOCK_N, BLOCKS, WIDE, True, OPERAND,
            )  # fmt: skip


def expand(
    z: Tensor,
    b: Tensor,
    table: Tensor,
    plan: Plan,
    y: Tensor,
    slices: Sequence[tuple[int, int]],
    block_m: int = 0,
    block_n: int = 0,
    blocks: int = 0,
    wide: int = 0,
    warps: int = 0,
    stages: int = 0,
    early: int = 0,
) -> None:
    """:func:`loraforge.ops.expand` on operands that it has checked; an option of 0 takes the default.

    block_m: rows a program, a divisor of the plan's tile. block_n: channels a product; blocks: products a program.
    wide: depth of a product where the rank is above 16. warps, stages: of a program. early: 1 to start while the kernel
    before ends. bf16 products round Z to bf16; fp16 ones take Z as TF32, whose range it has.
    """
    block_m = min(plan.tile, block_m or 64)
    block_n, blocks = block_n or 128, blocks or 4
    group = block_n * blocks
    planes, _, count, capacity = z.shape
    firsts_and_channels = [number for pair in slices for number in pair] + [0, 0] * (3 - count)
    groups = sum(-(-channels // group) for _, channels in slices)
    _expand[groups, plan.segment_capacity * (plan.tile // block_m)](
        z,
        z.stride(0),
        b,
        table,
        plan.order,
        plan.segments,
        plan.count,
        y,
        y.stride(0),
        *firsts_and_channels,
        TILE=plan.tile,
        SLICES=count,
        CAPACITY=capacity,
        PLANES=planes,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCKS=blocks,
        NARROW=16,
        WIDE=wide or 64,
        OPERAND=tl.bfloat16 if y.dtype == torch.bfloat16 else tl.float32,
        EARLY=bool(early),
        **launch(warps or 4, stages or 3, early),
    )
