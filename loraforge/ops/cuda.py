"""The decode kernels by ctypes, on the current stream: plan, shrink, RowExpand, and both in one call.

Thin on purpose: operands are checked by the public ops (:mod:`loraforge.ops`), here only for what a kernel cannot do.
Nothing is allocated and nothing is read back, so that every call can be captured into a CUDA graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from loraforge.errors import LoraForgeError
from loraforge.jit import load
from loraforge.ops.plan import Plan

DTYPES = {torch.float16: 1, torch.bfloat16: 2}
MAX_TILE = 16  # rows of a segment that kernels on segments take
DIRECT = (1, 5, 7)  # variants of shrink that go by tokens alone
Slices = Sequence[tuple[int, int]]

_POINTER, _INT, _WIDE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_PLAN = [_POINTER, _POINTER, _POINTER, _INT, _INT]  # order, segments, count, segment capacity, tokens
_SLICES = [_INT, _POINTER, _POINTER]  # how many, first channels, numbers of channels
_PROTOTYPES: dict[str, list[Any]] = {
    "lf_lora_plan": [_POINTER, *[_INT] * 3, *[_POINTER] * 3, _INT, _POINTER],
    "lf_lora_shrink": [
        *(_POINTER, _WIDE, _INT, _POINTER, _POINTER, _INT, _INT, _POINTER),
        *(*_PLAN, _POINTER, _INT, _INT, _INT, _POINTER),
    ],
    "lf_lora_row_expand": [
        *(_POINTER, _INT, _INT, _POINTER, _POINTER, *_SLICES, _INT),
        *(*_PLAN, _POINTER, _WIDE, _INT, _INT, _INT, _POINTER),
    ],
    "lf_lora_fused": [
        *(_POINTER, _WIDE, _INT, _POINTER, _POINTER, _POINTER, *_SLICES, _INT, _POINTER),
        *(*_PLAN, _POINTER, _INT, _INT, _POINTER, _WIDE, _INT, _POINTER),
    ],
}


def fill(plan: Plan, slots: int) -> None:
    """Fill ``order``, ``segments`` and ``count`` of ``plan`` from its ``token_slots``, in one launch.

    A token whose slot is not in [0, slots) gets none. Stable and repeatable, the same as
    :func:`loraforge.ops.plan.fill_reference`.
    """
    if plan.tokens:
        _call(
            "lf_lora_plan",
            plan.token_slots,
            *(plan.token_slots.data_ptr(), plan.tokens, slots, plan.tile),
            *(plan.order.data_ptr(), plan.segments.data_ptr(), plan.count.data_ptr(), plan.segment_capacity),
        )


def shrink(x: Tensor, a: Tensor, table: Tensor, plan: Plan, z: Tensor, variant: int = 0) -> None:
    """Live entries of ``z`` [planes, T, slices, capacity] FP32 = X A^T, each plane the sum over its share of d_in.

    ``x``: bf16 or fp16 [T, d_in], rows 16-byte aligned; ``a``: the same dtype, directions 16-byte aligned.
    ``variant``: a number of kernels/include/loraforge/lora/shrink.cuh, 0 for the default. ``plan.tile`` is at most 16
    except for :data:`DIRECT` variants.
    """
    _aligned("x", x, 16, x.stride(0))
    if plan.tile > MAX_TILE and variant not in DIRECT:
        raise _too_tall(plan)
    planes, tokens, slices, capacity = z.shape
    if tokens:
        _call(
            "lf_lora_shrink",
            x,
            *(x.data_ptr(), x.stride(0), _dtype(x), a.data_ptr(), table.data_ptr(), slices, x.shape[1]),
            *(plan.token_slots.data_ptr(), *_plan(plan), z.data_ptr(), capacity, planes, variant),
        )


def expand(
    z: Tensor,
    b: Tensor,
    table: Tensor,
    plan: Plan,
    y: Tensor,
    slices: Slices,
    tile_limit: int = 16,
    staged: int = 1,
    variant: int = 0,
) -> None:
    """``y`` += scale Z B^T by RowExpand: thread-owned rows of B, reused over the tokens of a segment.

    ``tile_limit``: most rows of a segment that share one load of B (1, 4, 8 or 16); ``staged``: whether Z goes through
    shared memory; without, ``z`` is one plane of 16-byte rows. ``variant``: a number of
    kernels/include/loraforge/lora/row_expand.cuh, 0 for the default.
    """
    planes, tokens, count, capacity = z.shape
    if tokens:
        first, channels = _extents(tuple(slices))
        _call(
            "lf_lora_row_expand",
            y,
            *(
                z.data_ptr(),
                capacity,
                planes,
                b.data_ptr(),
                table.data_ptr(),
                count,
                first,
                channels,
                _dtype(y),
            ),
            *(*_plan(plan), y.data_ptr(), y.stride(0), tile_limit, staged, variant),
        )


def lora(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    table: Tensor,
    plan: Plan,
    z: Tensor,
    y: Tensor,
    slices: Slices,
    variant: int = 0,
) -> None:
    """``y`` += scale (X A^T) B^T in one call: a shrink and a RowExpand whose launches overlap.

    ``z``: workspace [planes, T, slices, capacity] FP32.
    ``variant``: a shrink's + 100 times a RowExpand's, 0 for the defaults. ``plan.tile`` is at most 16.
    """
    _aligned("x", x, 16, x.stride(0))
    if plan.tile > MAX_TILE:
        raise _too_tall(plan)
    planes, tokens, count, capacity = z.shape
    if tokens:
        first, channels = _extents(tuple(slices))
        _call(
            "lf_lora_fused",
            x,
            *(x.data_ptr(), x.stride(0), _dtype(x), a.data_ptr(), b.data_ptr(), table.data_ptr()),
            *(count, first, channels, x.shape[1], plan.token_slots.data_ptr(), *_plan(plan)),
            *(z.data_ptr(), capacity, planes, y.data_ptr(), y.stride(0), variant),
        )


@cache
def _function(name: str) -> Any:
    """A launcher of the library, which is built if need be, with its prototype."""
    function = getattr(load("lora", kind="nvcc" if torch.version.cuda else "hipcc"), name)
    function.argtypes, function.restype = _PROTOTYPES[name], ctypes.c_int
    return function


@cache
def _extents(slices: tuple[tuple[int, int], ...]) -> tuple[Any, Any]:
    """The two host arrays of a projection's slices, kept for good: a model has a handful."""
    kind = _INT * len(slices)
    return kind(*(first for first, _ in slices)), kind(*(channels for _, channels in slices))


def _plan(plan: Plan) -> tuple[int, int, int, int, int]:
    return (
        plan.order.data_ptr(),
        plan.segments.data_ptr(),
        plan.count.data_ptr(),
        plan.segment_capacity,
        plan.tokens,
    )


def _dtype(tensor: Tensor) -> int:
    code = DTYPES.get(tensor.dtype)
    if code is None:
        raise LoraForgeError(f"{tensor.dtype} operands", key="dtype", remedy="give bfloat16 or float16")
    return code


def _aligned(key: str, tensor: Tensor, size: int, stride: int) -> None:
    if tensor.data_ptr() % size or stride * tensor.element_size() % size:
        raise LoraForgeError(
            "rows are not aligned", key=key, remedy=f"give rows at multiples of {size} bytes"
        )


def _too_tall(plan: Plan) -> LoraForgeError:
    return LoraForgeError(
        f"segments of {plan.tile} rows", key="tile", remedy=f"plan with tile {MAX_TILE} or less"
    )


def _call(name: str, where: Tensor, *arguments: Any) -> None:
    with torch.cuda.device(where.device):
        stream = torch.cuda.current_stream(where.device).cuda_stream
        status = _function(name)(*arguments, stream)
    if status != 0:
        what = "unsupported arguments" if status == -1 else f"CUDA error {status}"
        raise LoraForgeError(
            what, key=name, remedy="take another kernel for this shape, and report the shape"
        )
