"""The public ops: what torch demands of a custom op, what a choice names, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loraforge import ops
from loraforge.errors import LoraForgeError
from loraforge.ops import plan as plans
from loraforge.ops import reference
from loraforge.ops.choice import BACKENDS, OPTIONS, Choice, Kernel
from loraforge.ops.plan import Plan
from loraforge.ops.slots import Slot, SlotTable

D_IN, SLICES = 16, [(0, 8), (8, 8)]


class Batch:
    """Five tokens over two adapters (ranks 3 and 1, then 0 and 2) and the base model."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.a = torch.randn(6, D_IN).bfloat16()
        self.b = torch.randn(64).bfloat16()
        self.table = SlotTable(2, 2)
        self.table.set(0, [Slot(0, 0, 3, 4, 0.5), Slot(3 * D_IN, 32, 1, 1, 2.0)])
        self.table.set(1, [Slot(), Slot(4 * D_IN, 40, 2, 2, 1.0)])
        self.plan = plans.empty_plan(5, 2, 4)
        self.plan.token_slots.copy_(torch.tensor([1, 0, -1, 0, 1], dtype=torch.int32))
        plans.fill_reference(self.plan, 2)
        self.x = torch.randn(5, D_IN).bfloat16()
        self.y = torch.randn(5, 16).bfloat16()
        self.z = torch.full((2, 5, 2, 4), torch.nan)

    def want(self) -> Tensor:
        z = reference.shrink(self.x, self.a, self.table, self.plan.token_slots, 4)
        return reference.expand(z, self.b, self.table, self.plan.token_slots, self.y, SLICES)


def test_shrink_then_expand_is_the_reference() -> None:
    batch = Batch()
    want, base = batch.want(), batch.y[2].clone()
    ops.shrink(batch.x, batch.a, batch.table.tensor, batch.plan, batch.z, kernel=Kernel("reference"))
    assert torch.isnan(batch.z[:, 2]).all()
    assert torch.isnan(batch.z[:, 0, 0]).all()
    ops.expand(batch.z, batch.b, batch.table.tensor, batch.plan, batch.y, SLICES, kernel=Kernel("reference"))
    torch.testing.assert_close(batch.y.double(), want, rtol=2**-8, atol=1e-6)
    assert torch.equal(batch.y[2], base)


def test_lora_is_both_and_takes_its_planes_of_a_larger_workspace() -> None:
    batch = Batch()
    want = batch.want()
    choice = Choice(Kernel("reference"), Kernel("reference"), planes=1)
    ops.lora(
        batch.x, batch.a, batch.b, batch.table.tensor, batch.plan, batch.z, batch.y, SLICES, choice=choice
    )
    torch.testing.assert_close(batch.y.double(), want, rtol=2**-8, atol=1e-6)
    assert torch.isnan(batch.z[1]).all()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", ["shrink", "expand", "lora"])
def test_torch_accepts_the_op(name: str, backend: str) -> None:
    batch, code = Batch(), [BACKENDS.index(backend)]
    z = batch.z[:1].zero_()
    routing: tuple[object, ...] = (
        batch.plan.token_slots, batch.plan.order, batch.plan.segments, batch.plan.count, batch.plan.tile
    )  # fmt: skip
    flat = [number for pair in SLICES for number in pair]
    arguments = {
        "shrink": (batch.x, batch.a, batch.table.tensor, *routing, z, code),
        "expand": (z, batch.b, batch.table.tensor, *routing, batch.y, flat, code),
        "lora": (
            batch.x, batch.a, batch.b, batch.table.tensor, *routing, z, batch.y, flat, 1, code, code
        ),
    }  # fmt: skip
    torch.library.opcheck(getattr(torch.ops.loraforge, name).default, arguments[name])


def test_a_plan_is_filled_where_it_lies() -> None:
    want, got = (plans.empty_plan(9, 3, 2) for _ in range(2))
    for plan in (want, got):
        plan.token_slots.copy_(torch.tensor([2, 0, -1, 0, 2, 0, 3, 0, 2], dtype=torch.int32))
    plans.fill_reference(want, 3)
    ops.fill(got, 3)
    count = int(want.count)
    assert torch.equal(got.count, want.count)
    assert torch.equal(got.order[:7], want.order[:7])
    assert torch.equal(got.segments[:count], want.segments[:count])


def test_a_compiled_caller_traces_through_without_a_break() -> None:
    batch = Batch()
    want = batch.want()

    def layer(x: Tensor, z: Tensor, y: Tensor, plan: Plan) -> Tensor:
        ops.lora(x, batch.a, batch.b, batch.table.tensor, plan, z, y, SLICES, choice=ops.REFERENCE)
        return y * 2

    got = torch.compile(layer, backend="aot_eager", fullgraph=True)(batch.x, batch.z, batch.y, batch.plan)
    torch.testing.assert_close(got.double(), 2 * want, rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(batch.y.double(), want, rtol=2**-8, atol=1e-6)


def test_a_choice_survives_json() -> None:
    choice = Choice(
        Kernel("direct", {"variant": 3}), Kernel("row_expand", {"tile_limit": 8}), tile=16, planes=4
    )
    assert Choice.from_json(choice.to_json()) == choice
    assert choice.codes == ([BACKENDS.index("direct"), 3], [BACKENDS.index("row_expand"), 8, 1, 0])
    assert Choice.from_json(ops.NATIVE.to_json()).native
    fused = Choice(Kernel("fused", {"variant": 2}))
    assert Choice.from_json(fused.to_json()).codes == ([BACKENDS.index("fused"), 2], [])


def test_every_backend_has_a_code() -> None:
    assert {name for table in OPTIONS.values() for name in table} == set(BACKENDS)


@pytest.mark.parametrize(
    ("shrink", "expand", "message"),
    [
        (Kernel("row_expand"), Kernel("row_expand"), "shrink: no backend 'row_expand'"),
        (Kernel("direct"), Kernel("direct"), "expand: no backend 'direct'"),
        (Kernel("direct", {"tile": 1}), Kernel("triton"), "shrink.direct: no option 'tile'"),
        (Kernel("triton"), None, "lora: no backend 'triton'"),
    ],
)
def test_a_choice_that_names_no_kernel_is_refused(
    shrink: Kernel, expand: Kernel | None, message: str
) -> None:
    with pytest.raises(LoraForgeError, match=message):
        Choice(shrink, expand)


def test_operands_that_do_not_fit_are_refused() -> None:
    batch, kernel = Batch(), Kernel("reference")
    table, plan = batch.table.tensor, batch.plan
    with pytest.raises(LoraForgeError, match=r"z: .* float32 \[planes, 5, 2, capacity\]"):
        ops.shrink(batch.x, batch.a, table, plan, batch.z[:, :4], kernel=kernel)
    with pytest.raises(LoraForgeError, match=r"a: .* contiguous torch.bfloat16"):
        ops.shrink(batch.x, batch.a.half(), table, plan, batch.z, kernel=kernel)
    with pytest.raises(LoraForgeError, match=r"slices: .* 2 pairs"):
        ops.expand(batch.z, batch.b, table, plan, batch.y, [(0, 16)], kernel=kernel)
    with pytest.raises(LoraForgeError, match="within the 16 columns"):
        ops.expand(batch.z, batch.b, table, plan, batch.y, [(0, 8), (9, 8)], kernel=kernel)
    with pytest.raises(LoraForgeError, match="at least 3 planes"):
        ops.lora(
            batch.x, batch.a, batch.b, table, plan, batch.z, batch.y, SLICES,
            choice=Choice(kernel, kernel, planes=3),
        )  # fmt: skip
    with pytest.raises(LoraForgeError, match="engine's own path"):
        ops.lora(batch.x, batch.a, batch.b, table, plan, batch.z, batch.y, SLICES, choice=ops.NATIVE)
