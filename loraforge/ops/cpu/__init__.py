"""The products on the processor: C++ with OpenMP where a compiler has built it, plain torch where not.

The same operands and the same rules as on a GPU (:mod:`loraforge.ops`): rank-aware, tokens of one adapter handled
together, tokens without an adapter untouched. Z has one plane: a core makes every sum whole. Compiled, a token's result
does not depend on the number of threads, which is torch's, and on the batch around it only where the processor has AMX
tiles, which take segments of sixteen tokens and more in another order of summation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from loraforge.errors import LoraForgeError
from loraforge.ops.cpu import fallback, native
from loraforge.ops.plan import Plan
from loraforge.ops.slots import MAX_SLICES

Slices = Sequence[tuple[int, int]]

DTYPES = {torch.float16: 1, torch.bfloat16: 2}  # codes of the C interface


def fill(plan: Plan, slots: int) -> None:
    """Fill ``order``, ``segments`` and ``count`` of ``plan`` from its ``token_slots``, as
    :func:`loraforge.ops.plan.fill_reference` does. A token whose slot is not in [0, slots) gets none."""
    library = native.library()
    if library is None:
        fallback.fill(plan, slots)
        return
    status = library.lf_cpu_plan(
        plan.token_slots.data_ptr(),
        plan.tokens,
        slots,
        plan.tile,
        plan.order.data_ptr(),
        plan.segments.data_ptr(),
        plan.count.data_ptr(),
    )
    if status:
        raise LoraForgeError(f"{slots} slots, tile {plan.tile}", key="plan", remedy="give positive numbers")


def shrink(x: Tensor, a: Tensor, table: Tensor, plan: Plan, z: Tensor) -> None:
    """Live entries of ``z`` FP32 [1, T, slices, capacity] = X A^T, for ``x`` bf16 or fp16 [T, d_in] with dense rows and
    ``a`` of its dtype, whose elements the offsets of ``table`` count.

    Raises LoraForgeError for another dtype, or a ``z`` of several planes.
    """
    planes, tokens, count, capacity = z.shape
    rows, d_in = x.shape
    code = DTYPES.get(x.dtype)
    if code is None or a.dtype != x.dtype or planes != 1 or rows != tokens or x.stride(1) != 1:
        _refuse(z, (x,), (a,))
    library = native.library()
    if library is None:
        fallback.shrink(x, a, table, plan, z)
    elif library.lf_cpu_lora(
        *(x.data_ptr(), x.stride(0), code, a.data_ptr(), None, table.data_ptr(), count, d_in),
        *(plan.order.data_ptr(), plan.segments.data_ptr(), plan.count.data_ptr(), z.data_ptr(), capacity),
        *(None, 0, None, None),
    ):
        _unsupported(count)


def expand(z: Tensor, b: Tensor, table: Tensor, plan: Plan, y: Tensor, slices: Slices) -> None:
    """``y`` [T, at least every first + channels], dense rows, bf16 or fp16: += scale Z B^T, rounded once, for ``b`` of
    its dtype. slices: (first, channels), one a slice of ``table``.

    Raises LoraForgeError for another dtype, or a ``z`` of several planes.
    """
    planes, tokens, count, capacity = z.shape
    code = DTYPES.get(y.dtype)
    if code is None or b.dtype != y.dtype or planes != 1 or y.shape[0] != tokens or y.stride(1) != 1:
        _refuse(z, (y,), (b,))
    first, channels = native.extents(tuple(slices), count)
    library = native.library()
    if library is None:
        fallback.expand(z, b, table, plan, y, slices)
    elif library.lf_cpu_lora(
        *(None, 0, code, None, b.data_ptr(), table.data_ptr(), count, 0),
        *(plan.order.data_ptr(), plan.segments.data_ptr(), plan.count.data_ptr(), z.data_ptr(), capacity),
        *(y.data_ptr(), y.stride(0), first, channels),
    ):
        _unsupported(count)


def lora(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    table: Tensor,
    plan: Plan,
    z: Tensor,
    y: Tensor,
    slices: Slices,
) -> None:
    """``y`` += scale (X A^T) B^T: :func:`shrink` and :func:`expand` in one parallel region.

    ``z``: workspace [1, T, slices, capacity] FP32, contents undefined before and after.
    Raises LoraForgeError as the two do.
    """
    planes, tokens, count, capacity = z.shape
    rows, d_in = x.shape
    dtype = x.dtype
    code = DTYPES.get(dtype)
    # written out, since this runs for every projection of every layer in every step
    if (
        code is None
        or a.dtype != dtype
        or b.dtype != dtype
        or y.dtype != dtype
        or planes != 1
        or rows != tokens
        or y.shape[0] != tokens
        or x.stride(1) != 1
        or y.stride(1) != 1
    ):
        _refuse(z, (x, y), (a, b))
    first, channels = native.extents(tuple(slices), count)
    library = native.library()
    if library is None:
        fallback.shrink(x, a, table, plan, z)
        fallback.expand(z, b, table, plan, y, slices)
    elif library.lf_cpu_lora(
        *(x.data_ptr(), x.stride(0), code, a.data_ptr(), b.data_ptr(), table.data_ptr(), count, d_in),
        *(plan.order.data_ptr(), plan.segments.data_ptr(), plan.count.data_ptr(), z.data_ptr(), capacity),
        *(y.data_ptr(), y.stride(0), first, channels),
    ):
        _unsupported(count)


def _refuse(z: Tensor, activations: tuple[Tensor, ...], factors: tuple[Tensor, ...]) -> NoReturn:
    """Say which operand does not fit."""
    if z.shape[0] != 1:
        raise LoraForgeError(
            f"{z.shape[0]} planes", key="z", remedy="give one plane: on a CPU every sum is made whole"
        )
    dtypes = [tensor.dtype for tensor in (*activations, *factors)]
    if dtypes[0] not in DTYPES or len(set(dtypes)) > 1:
        raise LoraForgeError(
            " and ".join(map(str, dtypes)),
            key="dtype",
            remedy="give operands of one dtype, bfloat16 or float16",
        )
    shapes = ", ".join(f"{list(tensor.shape)} with strides {list(tensor.stride())}" for tensor in activations)
    raise LoraForgeError(shapes, key="x and y", remedy=f"give {z.shape[1]} dense rows")


def _unsupported(slices: int) -> NoReturn:
    raise LoraForgeError(f"{slices} slices", key="table", remedy=f"give 1 to {MAX_SLICES}")
