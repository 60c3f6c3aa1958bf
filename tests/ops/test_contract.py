"""Slot tables, plans and the reference: what every backend is held to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraforge.errors import LoraForgeError
from loraforge.ops import plan as plans
from loraforge.ops import reference
from loraforge.ops.slots import Slot, SlotTable, bucket


def test_buckets_are_powers_of_two() -> None:
    assert [bucket(r) for r in (0, 1, 2, 3, 4, 5, 31, 33, 64, 65)] == [0, 1, 2, 4, 4, 8, 32, 64, 64, 128]


def test_rows_survive_the_packing_and_the_address_stays() -> None:
    table = SlotTable(3, 2)
    address = table.tensor.data_ptr()
    rows = [Slot(2**40 + 3, 7, 5, 8, -0.25), Slot(-1, 2**33, 0, 0, 1.0)]
    table.set(1, rows)
    assert [table.row(1, 0), table.row(1, 1)] == rows
    assert table.row(0, 0) == Slot(scale=0.0)
    table.clear(1)
    assert table.row(1, 0).rank == 0
    assert table.tensor.data_ptr() == address


def test_a_row_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(LoraForgeError, match="rank 9 in rows of 8"):
        SlotTable(1, 1).set(0, [Slot(rank=9, width=8)])
    with pytest.raises(LoraForgeError, match="2 rows for 1"):
        SlotTable(1, 1).set(0, [Slot(), Slot()])
    with pytest.raises(LoraForgeError, match="4 slices"):
        SlotTable(1, 4)


def test_factors_that_a_gpu_could_not_load_are_refused() -> None:
    table = SlotTable(1, 1, device="meta")  # any device but the CPU
    with pytest.raises(LoraForgeError, match="A at a multiple of 8"):
        table.set(0, [Slot(a_offset=4, rank=1, width=1)])
    with pytest.raises(LoraForgeError, match="B at one of 4"):
        table.set(0, [Slot(b_offset=2, rank=3, width=4)])
    table.set(0, [Slot(a_offset=8, b_offset=3, rank=1, width=1)])


@given(st.lists(st.integers(-1, 6), min_size=1, max_size=80), st.sampled_from([1, 4, 16]))
def test_a_plan_names_each_adapter_token_once_within_its_capacity(routing: list[int], tile: int) -> None:
    plan = plans.empty_plan(len(routing), 7, tile)
    plan.token_slots.copy_(torch.tensor(routing, dtype=torch.int32))
    plans.fill_reference(plan, 7)
    count = int(plan.count)
    assert count <= plan.segment_capacity
    seen: list[int] = []
    for start, rows, slot, _ in plan.segments[:count].tolist():
        tokens = plan.order[start : start + rows].tolist()
        assert 1 <= rows <= tile
        assert {routing[token] for token in tokens} == {slot}
        seen += tokens
    assert sorted(seen) == [token for token, slot in enumerate(routing) if slot >= 0]


def test_the_reference_is_the_dense_product() -> None:
    torch.manual_seed(0)
    a, b, x = torch.randn(3, 6), torch.randn(5, 4), torch.randn(2, 6)
    b[:, 3] = torch.nan  # padding
    table = SlotTable(2, 1)
    table.set(1, [Slot(0, 0, 3, 4, 0.5)])
    slots = torch.tensor([1, -1], dtype=torch.int32)
    z = reference.shrink(x, a, table, slots, 4)
    y = torch.randn(2, 7)
    got = reference.expand(z, b, table, slots, y, [(1, 5)])
    want = y.double()
    want[0, 1:6] += 0.5 * (x[0].double() @ a.double().T @ b[:, :3].double().T)
    torch.testing.assert_close(got, want)
    assert torch.isnan(z[1]).all()
