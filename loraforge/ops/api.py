"""The two products and their sum, as torch custom ops: one function an op, whichever kernel runs.

``loraforge::shrink``, ``loraforge::expand`` and ``loraforge::lora`` take tensors and flat lists of ints alone, write
into tensors that the caller owns, allocate nothing and read nothing back to the host, so that Dynamo traces their
callers and CUDA graphs record them. Which kernel runs is data (:mod:`loraforge.ops.choice`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from loraforge.errors import LoraForgeError
from loraforge.ops import reference
from loraforge.ops.choice import BACKENDS, Choice, Kernel
from loraforge.ops.plan import Plan
from loraforge.ops.slots import SlotTable

Slices = Sequence[tuple[int, int]]

_LIBRARY: Any = torch.library.Library("loraforge", "DEF")  # type: ignore[no-untyped-call]
_PLAN = "Tensor token_slots, Tensor order, Tensor segments, Tensor count, int tile"
_LIBRARY.define(f"shrink(Tensor x, Tensor a, Tensor table, {_PLAN}, Tensor(z!) z, int[] kernel) -> ()")
_LIBRARY.define(
    f"expand(Tensor z, Tensor b, Tensor table, {_PLAN}, Tensor(y!) y, int[] slices, int[] kernel) -> ()"
)
_LIBRARY.define(
    f"lora(Tensor x, Tensor a, Tensor b, Tensor table, {_PLAN}, Tensor(z!) z, Tensor(y!) y, "
    "int[] slices, int planes, int[] kernel, int[] expand) -> ()"
)


def fill(plan: Plan, slots: int) -> None:
    """Fill ``plan.order``, ``plan.segments`` and ``plan.count`` from ``plan.token_slots``, in place, on its device.

    Once a step, for all layers. Tokens keep their order within a slot; a token whose slot is not in [0, slots) gets
    none. On a GPU one launch that reads nothing back, so that it can be captured.
    """
    _module("direct" if plan.token_slots.is_cuda else "cpu").fill(plan, slots)


def shrink(x: Tensor, a: Tensor, table: Tensor, plan: Plan, z: Tensor, *, kernel: Kernel) -> None:
    """Z = X A^T: for each token its adapter's live directions, for every slice.

    x: bf16 or fp16 [T, d_in], innermost stride 1. a: same dtype, any shape; ``table`` holds offsets of its elements.
    table: int64 [slots, slices, 4], the ``tensor`` of a :class:`~loraforge.ops.slots.SlotTable`.
    plan: this batch's plan. z: FP32 [planes, T, slices, capacity], contiguous; the planes' sum is the product. Entries
    past a slice's rank and rows of tokens without an adapter are left as they are.

    Raises LoraForgeError where operands do not fit together or the backend is not there (paper, section 5).
    """
    torch.ops.loraforge.shrink(x, a, table, *_plan(plan), z, kernel.codes("shrink"))


def expand(
    z: Tensor, b: Tensor, table: Tensor, plan: Plan, y: Tensor, slices: Slices, *, kernel: Kernel
) -> None:
    """Y[:, first : first + channels] += scale Z B^T for each slice, rounded to the dtype of ``y`` once.

    z: FP32 [planes, T, slices, capacity] as :func:`shrink` left it; planes are summed. b: bf16 or fp16, any shape;
    ``table`` holds offsets of its elements. y: dtype of ``b``, [T, at least every first + channels], innermost stride
    1. slices: (first, channels), one a slice of ``table``. Rows of tokens without an adapter are not touched.

    Raises LoraForgeError where operands do not fit together or the backend is not there (paper, section 5).
    """
    torch.ops.loraforge.expand(z, b, table, *_plan(plan), y, _flat(slices), kernel.codes("expand"))


def lora(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    table: Tensor,
    plan: Plan,
    z: Tensor,
    y: Tensor,
    slices: Slices,
    *,
    choice: Choice,
    traced: bool = True,
) -> None:
    """Y += scale (X A^T) B^T by the kernels of ``choice``: :func:`shrink` then :func:`expand`, or one for both.

    z: workspace, FP32 [at least choice.planes, T, slices, capacity], contents undefined before and after.
    traced: False for a caller that is an op itself, whose inside nothing traces: not through torch's dispatcher once
    more, which costs the host a third of the call. The other operands are those of the two products.

    Raises LoraForgeError where operands do not fit together, the backend is not there, or the choice is native: the
    engine's own path is the engine's to call.
    """
    call = torch.ops.loraforge.lora if traced else _lora
    call(x, a, b, table, *_plan(plan), z, y, _flat(slices), choice.planes, *choice.codes)


def _plan(plan: Plan) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    return plan.token_slots, plan.order, plan.segments, plan.count, plan.tile


def _flat(slices: Slices) -> list[int]:
    return [number for pair in slices for number in pair]


# --- implementations ---------------------------------------------------------------------------------------------


def _shrink(
    x: Tensor,
    a: Tensor,
    table: Tensor,
    token_slots: Tensor,
    order: Tensor,
    segments: Tensor,
    count: Tensor,
    tile: int,
    z: Tensor,
    kernel: list[int],
) -> None:
    _check_z(z, table, token_slots)
    _check(
        x.dim() == 2 and x.shape[0] == token_slots.shape[0] and x.stride(1) == 1, "x", "[T, d_in], rows dense"
    )
    _check(a.dtype == x.dtype and a.is_contiguous(), "a", f"contiguous {x.dtype}")
    plan = Plan(token_slots, order, segments, count, tile)
    backend, *options = kernel
    name = BACKENDS[backend]
    if name == "reference":
        full = reference.shrink(x, a, _table(table), token_slots, z.shape[3])
        _write_live(z, full)
    else:
        _module(name).shrink(x, a, table, plan, z, *options)


def _expand(
    z: Tensor,
    b: Tensor,
    table: Tensor,
    token_slots: Tensor,
    order: Tensor,
    segments: Tensor,
    count: Tensor,
    tile: int,
    y: Tensor,
    slices: list[int],
    kernel: list[int],
) -> None:
    _check_z(z, table, token_slots)
    _check(b.dtype == y.dtype and b.is_contiguous(), "b", f"contiguous {y.dtype}")
    pairs = _check_y(y, table, token_slots, slices)
    plan = Plan(token_slots, order, segments, count, tile)
    backend, *options = kernel
    name = BACKENDS[backend]
    if name == "reference":
        live = token_slots >= 0
        total = reference.expand(z.double().sum(0), b, _table(table), token_slots, y, pairs)
        y[live] = total.to(y)[live]
    else:
        _module(name).expand(z, b, table, plan, y, pairs, *options)


def _lora(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    table: Tensor,
    token_slots: Tensor,
    order: Tensor,
    segments: Tensor,
    count: Tensor,
    tile: int,
    z: Tensor,
    y: Tensor,
    slices: list[int],
    planes: int,
    kernel: list[int],
    expand: list[int],
) -> None:
    _check(z.shape[0] >= planes, "z", f"at least {planes} planes")
    if expand:
        part = z[:planes]
        _shrink(x, a, table, token_slots, order, segments, count, tile, part, kernel)
        _expand(part, b, table, token_slots, order, segments, count, tile, y, slices, _following(expand))
        return
    backend, *options = kernel
    name = BACKENDS[backend]
    if name == "native":
        raise LoraForgeError(
            "native is the engine's own path", key="choice", remedy="call the engine's kernels"
        )
    _check_z(z, table, token_slots)
    pairs = _check_y(y, table, token_slots, slices)
    _check(a.dtype == b.dtype == x.dtype == y.dtype, "a, b, x, y", "of one dtype")
    plan = Plan(token_slots, order, segments, count, tile)
    _module(name).lora(x, a, b, table, plan, z[:planes], y, pairs, *options)


def _following(kernel: list[int]) -> list[int]:
    """An expand that is allowed to start early, told that it comes right behind a shrink."""
    if BACKENDS[kernel[0]] == "triton" and kernel[-1]:
        return [*kernel[:-1], 2]
    return kernel


def _nothing(*_: Any) -> None:
    """The fake of every op here: outputs are the caller's tensors, so there is no shape to infer."""


for _name, _call in (("shrink", _shrink), ("expand", _expand), ("lora", _lora)):
    _LIBRARY.impl(_name, _call, "CPU")
    _LIBRARY.impl(_name, _call, "CUDA")
    torch.library.register_fake(f"loraforge::{_name}", _nothing, lib=_LIBRARY)


@cache
def _module(backend: str) -> ModuleType:
    """The module that has a backend's ``shrink``, ``expand`` or ``lora``; imported at the first use."""
    return import_module(f"loraforge.ops.{backend if backend in ('triton', 'cpu') else 'cuda'}")


def _check(good: bool, key: str, wanted: str) -> None:
    if not good:
        raise LoraForgeError("operand does not fit", key=key, remedy=f"give it {wanted}")


def _check_z(z: Tensor, table: Tensor, token_slots: Tensor) -> None:
    tokens, slices = token_slots.shape[0], table.shape[1]
    _check(
        z.dtype == torch.float32 and z.dim() == 4 and z.shape[1:3] == (tokens, slices) and z.is_contiguous(),
        "z",
        f"as contiguous float32 [planes, {tokens}, {slices}, capacity]",
    )


def _check_y(y: Tensor, table: Tensor, token_slots: Tensor, slices: list[int]) -> list[tuple[int, int]]:
    pairs = list(zip(slices[::2], slices[1::2], strict=True))
    _check(len(pairs) == table.shape[1], "slices", f"as {table.shape[1]} pairs (first, channels)")
    _check(
        y.dim() == 2 and y.shape[0] == token_slots.shape[0] and y.stride(1) == 1,
        "y",
        "as [T, channels], rows dense",
    )
    _check(
        all(first >= 0 and channels > 0 and first + channels <= y.shape[1] for first, channels in pairs),
        "slices",
        f"within the {y.shape[1]} columns of y",
    )
    return pairs


def _table(tensor: Tensor) -> SlotTable:
    table = SlotTable(tensor.shape[0], tensor.shape[1])
    table.tensor = tensor
    return table


def _write_live(z: Tensor, full: Tensor) -> None:
    """Put what the reference computed into the first plane and zeros into the rest, live entries alone."""
    live = ~torch.isnan(full)
    for plane, values in zip(z, [full, *[torch.zeros_like(full)] * (z.shape[0] - 1)], strict=True):
        plane[live.to(z.device)] = values[live].to(plane)
