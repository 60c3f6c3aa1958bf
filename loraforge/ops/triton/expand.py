"""Rank-aware expand for prefill on tensor cores: Y += scale Z B^T, bound by the traffic of Y (paper, section 5).

A program keeps up to BLOCK_M rows of one segment's Z in registers, summed over planes, and walks over a few blocks of
output channels. The rank picks the depth of the product on the device: 16, 64 or 128, and a loop over pieces beyond
that or where rows of B are not a whole number of 16-byte vectors.

Right behind a shrink of ours (``follows``) Z alone is waited for: plan and table, Y and, in programs of few rows, B are
on their way before. A shrink lets the next kernel start only after it has itself waited for what came before it.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# What is jitted is Triton's language, not Python's.

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from loraforge.ops.plan import Plan
from loraforge.ops.triton.launch import height, launch


@triton.jit
def _inner(
    z, live, first, rank, plane_stride, CAPACITY: tl.constexpr, PLANES: tl.constexpr, DEPTH: tl.constexpr
):
    """Z [BLOCK_M, DEPTH] from direction ``first``, planes summed, zero past the rank."""
    k = first + tl.arange(0, DEPTH)
    # whole vectors within the row are read, whatever lies past the rank, and then dropped
    mask = live[:, None] & (k < CAPACITY)[None, :]
    FEW: tl.constexpr = DEPTH <= 16 or z.shape[0] * DEPTH <= 1024
    total = tl.load(z[:, None] + k[None, :], mask=mask, other=0.0)
    if FEW:  # all planes are asked for at once where registers allow it
        for plane in tl.static_range(1, PLANES):
            total += tl.load(z[:, None] + (plane * plane_stride + k)[None, :], mask=mask, other=0.0)
    else:
        for plane in tl.range(1, PLANES, num_stages=1):
            total += tl.load(z[:, None] + (plane * plane_stride + k)[None, :], mask=mask, other=0.0)
    return tl.where(k[None, :] < rank, total, 0.0)


@triton.jit
def _factor(
    b,
    b_offset,
    width,
    channel,
    channel_live,
    first,
    rank,
    DEPTH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """B^T [DEPTH, BLOCK_N] of the channels ``channel``, from direction ``first``, anything past the rank.

    ALIGNED: rows are known to be a multiple of 8 wide; else that is looked up here.
    """
    k = first + tl.arange(0, DEPTH)
    # written as products of 8, so that the compiler sees that 16 bytes can be read at once
    whole = (width >> 3) * 8
    vectors = b + (b_offset >> 3) * 8 + ((channel * whole)[None, :] + k[:, None])
    mask = channel_live[None, :] & (k < whole)[:, None]
    if ALIGNED:  # noqa: SIM114  decided when it is compiled
        part = tl.load(vectors, mask=mask, other=0.0)
    elif width % 8 == 0:
        part = tl.load(vectors, mask=mask, other=0.0)
    else:
        part = tl.load(
            b + b_offset + ((channel * width)[None, :] + k[:, None]),
            mask=channel_live[None, :] & (k < rank)[:, None],
            other=0.0,
        )
    return part


@triton.jit
def _live(part, first, rank, OPERAND: tl.constexpr):
    """``part`` of :func:`_factor` with zeros past the rank."""
    k = first + tl.arange(0, part.shape[0])
    return tl.where(k[:, None] < rank, part, 0.0).to(OPERAND)


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
    blocks,
    channels,
    CAPACITY: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPTH: tl.constexpr,
    TWICE: tl.constexpr,
    LONG: tl.constexpr,
    OPERAND: tl.constexpr,
    EARLY: tl.constexpr,
):
    """``blocks`` blocks of channels from ``begin``; z, y: pointers [BLOCK_M] to rows.

    TWICE: the rank may reach twice DEPTH. LONG: it may be anything, and so may the width of a row of B.
    """
    ALIGNED: tl.constexpr = DEPTH > 16 and not LONG
    # with few rows it is latencies that count: B is then a block ahead, as Y always is
    AHEAD: tl.constexpr = y.shape[0] <= 16 and not LONG
    channel = begin + tl.arange(0, BLOCK_N)
    channel_live = channel < channels
    base = tl.load(y[:, None] + channel[None, :], mask=live[:, None] & channel_live[None, :], other=0.0)
    if AHEAD:
        near = _factor(b, b_offset, width, channel, channel_live, 0, rank, DEPTH, ALIGNED)
        if TWICE:
            far = _factor(b, b_offset, width, channel, channel_live, DEPTH, rank, DEPTH, ALIGNED)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    inner = _inner(z, live, 0, rank, plane_stride, CAPACITY, PLANES, DEPTH).to(OPERAND)
    if TWICE:
        more = _inner(z, live, DEPTH, rank, plane_stride, CAPACITY, PLANES, DEPTH).to(OPERAND)
    for block in tl.range(0, blocks, num_stages=1):
        channel = begin + block * BLOCK_N + tl.arange(0, BLOCK_N)
        channel_live = channel < channels
        place = y[:, None] + channel[None, :]
        mask = live[:, None] & channel_live[None, :]
        # the next block of Y is asked for before this one is waited for
        following = channel + BLOCK_N
        following_live = (following < channels) & (block + 1 < blocks)
        ahead = tl.load(
            y[:, None] + following[None, :], mask=live[:, None] & following_live[None, :], other=0.0
        )
        if AHEAD:
            factor = _live(near, 0, rank, OPERAND)
            near = _factor(b, b_offset, width, following, following_live, 0, rank, DEPTH, ALIGNED)
        else:
            factor = _live(
                _factor(b, b_offset, width, channel, channel_live, 0, rank, DEPTH, ALIGNED), 0, rank, OPERAND
            )
        delta = tl.dot(inner, factor, input_precision="tf32")
        if TWICE:
            if AHEAD:
                factor = _live(far, DEPTH, rank, OPERAND)
                far = _factor(b, b_offset, width, following, following_live, DEPTH, rank, DEPTH, ALIGNED)
            else:
                factor = _live(
                    _factor(b, b_offset, width, channel, channel_live, DEPTH, rank, DEPTH, ALIGNED),
                    DEPTH,
                    rank,
                    OPERAND,
                )
            delta = tl.dot(more, factor, delta, input_precision="tf32")
        if LONG:
            for first in tl.range(DEPTH, rank, DEPTH, num_stages=1):
                more = _inner(z, live, first, rank, plane_stride, CAPACITY, PLANES, DEPTH).to(OPERAND)
                factor = _live(
                    _factor(b, b_offset, width, channel, channel_live, first, rank, DEPTH, ALIGNED),
                    first,
                    rank,
                    OPERAND,
                )
                delta = tl.dot(more, factor, delta, input_precision="tf32")
        tl.store(place, (base.to(tl.float32) + scale * delta).to(base.dtype), mask=mask)
        base = ahead


@triton.jit(
    do_not_specialize=["tokens", "slices", "blocks", "follows"]
)  # what changes with the batch compiles nothing anew
def _expand(
    z,
    tokens,
    b,
    table,
    order,
    segments,
    count,
    y,
    y_stride,
    slices,
    blocks,
    follows,
    first0,
    channels0,
    first1,
    channels1,
    first2,
    channels2,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OPERAND: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid: (groups of blocks * BLOCK_N channels, slice by slice; segment capacity * TILE / BLOCK_M)."""
    if EARLY:  # noqa: SIM102  decided when it is compiled
        if follows == 0:
            gdc_wait()
    PARTS: tl.constexpr = TILE // BLOCK_M
    reach = blocks * BLOCK_N  # channels of one group
    segment = tl.program_id(1) // PARTS
    skip = tl.program_id(1) % PARTS * BLOCK_M
    segments += segment * 4
    # read before it is known whether the segment is live, to wait for memory once
    start = tl.load(segments) + skip
    height = tl.load(segments + 1) - skip
    slot = tl.load(segments + 2)
    if (segment >= tl.load(count)) | (height <= 0):
        if EARLY:
            gdc_wait()
        return
    m = tl.arange(0, BLOCK_M)
    live = m < height
    rows = tl.load(order + start + m, mask=live, other=0).to(tl.int64)

    group = tl.program_id(0)
    groups0 = (channels0 + reach - 1) // reach
    groups1 = (channels1 + reach - 1) // reach
    # a select keeps what is known of both sides' alignment, which a branch would not
    in1 = group >= groups0
    in2 = group >= groups0 + groups1
    piece = in1.to(tl.int32) + in2.to(tl.int32)
    group -= tl.where(in2, groups0 + groups1, tl.where(in1, groups0, 0))
    first = tl.where(in2, first2, tl.where(in1, first1, first0))
    channels = tl.where(in2, channels2, tl.where(in1, channels1, channels0))

    table += (slot.to(tl.int64) * slices + piece) * 4
    b_offset = tl.load(table + 1)
    extent = tl.load(table + 2)
    scale = tl.load(table + 3).to(tl.int32).to(tl.float32, bitcast=True)
    rank = extent.to(tl.int32)
    width = (extent >> 32).to(tl.int32)
    if rank == 0:
        if EARLY:
            gdc_wait()
        return
    plane_stride = tokens * slices * CAPACITY
    z += rows * (slices * CAPACITY) + piece * CAPACITY
    y += rows * y_stride + first
    begin = group * reach
    if rank <= 16:
        _blocks(
            z, plane_stride, b, b_offset, rank, width, scale, y, live, begin, blocks, channels,
            CAPACITY, PLANES, BLOCK_N, 16, False, False, OPERAND, EARLY,
        )  # fmt: skip
    elif CAPACITY > 16:
        aligned = width % 8 == 0
        if (rank <= 64) & aligned:
            _blocks(
                z, plane_stride, b, b_offset, rank, width, scale, y, live, begin, blocks * 2, channels,
                CAPACITY, PLANES, BLOCK_N // 2, 64, False, False, OPERAND, EARLY,
            )  # fmt: skip
        elif (CAPACITY > 64) & (rank <= 128) & aligned:
            _blocks(
                z, plane_stride, b, b_offset, rank, width, scale, y, live, begin, blocks * 2, channels,
                CAPACITY, PLANES, BLOCK_N // 2, 64, True, False, OPERAND, EARLY,
            )  # fmt: skip
        else:
            _blocks(
                z, plane_stride, b, b_offset, rank, width, scale, y, live, begin, blocks * 2, channels,
                CAPACITY, PLANES, BLOCK_N // 2, 32, False, True, OPERAND, EARLY,
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
    warps: int = 0,
    registers: int = 0,
    early: int = 0,
) -> None:
    """:func:`loraforge.ops.expand` on operands that it has checked; an option of 0 takes the default.

    block_m: rows a program, a divisor of the plan's tile. block_n: channels a product; blocks: products a program.
    warps: of a program; registers: at most so many a thread. early: 1 to start while the kernel before ends, 2 where
    that kernel is a shrink of ours, which writes this ``z``. bf16 products round Z to bf16; fp16 ones take Z as TF32,
    whose range it has.
    """
    block_m = height(plan.tile, block_m or 64)
    block_n, blocks = block_n or 64, blocks or 4
    group = block_n * blocks
    planes, tokens, count, capacity = z.shape
    firsts_and_channels = [number for pair in slices for number in pair] + [0, 0] * (3 - count)
    groups = sum(-(-channels // group) for _, channels in slices)
    with torch.cuda.device_of(y):
        _expand[groups, plan.segment_capacity * (plan.tile // block_m)](
            z,
            tokens,
            b,
            table,
            plan.order,
            plan.segments,
            plan.count,
            y,
            y.stride(0),
            count,
            blocks,
            int(early > 1),
            *firsts_and_channels,
            TILE=plan.tile,
            CAPACITY=capacity,
            PLANES=planes,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            OPERAND=tl.bfloat16 if y.dtype == torch.bfloat16 else tl.float32,
            EARLY=bool(early),
            **launch(warps or 4, 1, registers or 128, early),
        )
