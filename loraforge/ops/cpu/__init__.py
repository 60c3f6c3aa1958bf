"""The products on the processor: C++ with OpenMP where a compiler has built it, plain torch where not.

The same operands and the same rules as on a GPU (:mod:`loraforge.ops`): rank-aware, tokens of one adapter handled
together, tokens without an adapter untouched. Z has one plane: a core makes every sum whole. The result of a token
depends neither on the batch around it nor on the number of threads, which is torch's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loraforge.errors import LoraForgeError
from loraforge.ops.cpu import fallback, native
from loraforge.ops.plan import Plan

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
    code = _code(z, (x,), (a,))
    library = native.library()
    if library is None:
        fallback.shrink(x, a, table, plan, z)
        return
    library.lf_cpu_lora(
        *(x.data_ptr(), x.stride(0), code, a.data_ptr(), None, table.data_ptr(), z.shape[2], x.shape[1]),
        *(plan.order.data_ptr(), plan.segments.data_ptr(), plan.count.data_ptr(), z.data_ptr(), z.shape[3]),
        *(None, 0, None, None),
    )


def expand(z: Tensor, b: Tensor, table: Tensor, plan: Plan, y: Tensor, slices: Slices) -> None:
    """``y`` [T, at least every first + channels], dense rows, bf16 or fp16: += scale Z B^T, rounded once, for ``b`` of
    its dtype. slices: (first, channels), one a slice of ``table``.

    Raises LoraForgeError for another dtype, or a ``z`` of several planes.
    """
    code = _code(z, (y,), (b,))
    library = native.library()
    if library is None:
        fallback.expand(z, b, table, plan, y, slices)
        return
    first, channels = native.extents(tuple(slices))
    library.lf_cpu_lora(
        *(None, 0, code, None, b.data_ptr(), table.data_ptr(), z.shape[2], 0),
        *(plan.order.data_ptr(), plan.segments.data_ptr(), plan.count.data_ptr(), z.data_ptr(), z.shape[3]),
        *(y.data_ptr(), y.stride(0), first, channels),
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
    sync: Tensor | None = None,
) -> None:
    """``y`` += scale (X A^T) B^T: :func:`shrink` and :func:`expand` in one parallel region.

    ``z``: workspace [1, T, slices, capacity] FP32, contents undefined before and after. ``sync`` is for GPUs.
    Raises LoraForgeError as the two do.
    """
    code = _code(z, (x, y), (a, b))
    library = native.library()
    if library is None:
        fallback.shrink(x, a, table, plan, z)
        fallback.expand(z, b, table, plan, y, slices)
        return
    first, channels = native.extents(tuple(slices))
    library.lf_cpu_lora(
        *(x.data_ptr(), x.stride(0), code, a.data_ptr(), b.data_ptr(), table.data_ptr(), z.shape[2]),
        *(x.shape[1], plan.order.data_ptr(), plan.segments.data_ptr(), plan.count.data_ptr()),
        *(z.data_ptr(), z.shape[3], y.data_ptr(), y.stride(0), first, channels),
    )


def _code(z: Tensor, activations: tuple[Tensor, ...], factors: tuple[Tensor, ...]) -> int:
    """The code of the operands' dtype."""
    if z.shape[0] != 1:
        raise LoraForgeError(
            f"{z.shape[0]} planes", key="z", remedy="give one plane: on a CPU every sum is made whole"
        )
    dtype = activations[0].dtype
    if dtype not in DTYPES or any(tensor.dtype != dtype for tensor in (*activations, *factors)):
        raise LoraForgeError(
            " and ".join(str(tensor.dtype) for tensor in (*activations, *factors)),
            key="dtype",
            remedy="give operands of one dtype, bfloat16 or float16",
        )
    for tensor in activations:
        if tensor.shape[0] != z.shape[1] or tensor.stride(1) != 1:
            raise LoraForgeError(
                f"{list(tensor.shape)} with strides {list(tensor.stride())}",
                key="x and y",
                remedy=f"give {z.shape[1]} dense rows",
            )
    return DTYPES[dtype]
