"""Adapters in one block: everything finds its place, whatever ranks and layers an adapter has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loraforge.ops.slots import SlotTable, bucket
from loraforge.runtime.packed import ALIGN_BYTES, Layout
from loraforge.runtime.pool import RaggedPool
from loraforge.runtime.ranks import Factors, Projection

PROJECTIONS = (
    Projection("0.qkv", 32, (24, 8, 8)),
    Projection("0.o", 24, (32,)),
    Projection("0.gate_up", 32, (40, 40)),
    Projection("1.qkv", 32, (24, 8, 8)),
    Projection("1.o", 24, (32,)),
)
SLOTS = 3
RANKS = st.tuples(*(st.none() | st.tuples(*(st.integers(0, 9) for _ in its.channels)) for its in PROJECTIONS))


def _factors(
    ranks: tuple[tuple[int, ...] | None, ...], seed: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, list[Factors | None]]:
    make = torch.Generator().manual_seed(seed)
    return {
        projection.name: [
            (
                torch.randn(rank, projection.d_in, generator=make).to(dtype),
                torch.randn(channels, rank, generator=make).to(dtype),
            )
            if rank
            else None
            for rank, channels in zip(its, projection.channels, strict=True)
        ]
        for its, projection in zip(ranks, PROJECTIONS, strict=True)
        if its is not None
    }


def _read(table: SlotTable, slot: int, operand: Tensor, projection: Projection) -> list[Factors | None]:
    """What a table says of a slot, from the operand that its offsets count the elements of."""
    found: list[Factors | None] = []
    for piece, channels in enumerate(projection.channels):
        row = table.row(slot, piece)
        if not row.rank:
            found.append(None)
            continue
        assert row.width == bucket(row.rank)
        assert row.a_offset * 2 % ALIGN_BYTES == row.b_offset * 2 % ALIGN_BYTES == 0
        a = operand[row.a_offset : row.a_offset + row.rank * projection.d_in]
        b = operand[row.b_offset : row.b_offset + channels * row.width].view(channels, row.width)
        found.append((a.view(row.rank, projection.d_in), b[:, : row.rank]))
    return found


def _assert_same(found: list[Factors | None], wanted: list[Factors | None]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])


@settings(max_examples=60, deadline=None)
@given(RANKS)
def test_a_block_holds_every_direction_once(ranks: tuple[tuple[int, ...] | None, ...]) -> None:
    layout = Layout(PROJECTIONS, torch.bfloat16)
    factors = _factors(ranks, 0)
    packed = layout.pack(factors)
    for slices, names in layout.groups.items():
        for place, name in enumerate(names):
            table = SlotTable.of(packed.rows[slices])
            wanted = factors.get(name) or [None] * slices
            _assert_same(_read(table, place, packed.data, layout.projections[name]), wanted)
    live = [tensor for pairs in factors.values() for pair in pairs if pair for tensor in pair]
    assert packed.source_bytes == sum(tensor.numel() * 2 for tensor in live)
    assert packed.bytes == layout.bytes(packed.ranks) >= packed.source_bytes
    assert packed.ranks == {
        name: tuple(len(pair[0]) if pair else 0 for pair in pairs)
        for name, pairs in factors.items()
        if any(pairs)
    }


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, SLOTS - 1), st.none() | RANKS), min_size=1, max_size=12))
def test_tables_follow_what_the_slots_hold(
    steps: list[tuple[int, tuple[tuple[int, ...] | None, ...] | None]],
) -> None:
    """Loads, unloads and the moves that a small pool forces between them; adapters are empty, partial or whole."""
    whole = Layout(PROJECTIONS, torch.bfloat16).bytes({p.name: [9] * len(p.channels) for p in PROJECTIONS})
    pool = RaggedPool(PROJECTIONS, SLOTS, SLOTS * whole, torch.bfloat16)
    held: dict[int, dict[str, list[Factors | None]]] = {}
    for seed, (slot, ranks) in enumerate(steps):
        if ranks is None:
            pool.clear(slot)
            held.pop(slot, None)
        else:
            held[slot] = _factors(ranks, seed)
            pool.load(slot, pool.pack(held[slot]))
        for projection in PROJECTIONS:
            for place in range(SLOTS):
                wanted = held.get(place, {}).get(projection.name) or [None] * len(projection.channels)
                _assert_same(_read(pool.tables[projection.name], place, pool.buffer, projection), wanted)
    report = pool.report()
    assert report["adapters"] == len(held) == report["loads"] - report["unloads"]


def test_other_dtypes_are_converted_once() -> None:
    factors = _factors(((3, 0, 1), None, None, None, (4,)), 0, torch.float32)
    packed = Layout(PROJECTIONS, torch.float16).pack(factors)
    assert packed.data.dtype == torch.float16
    assert packed.source_bytes == ((3 + 1) * 32 + 24 * 3 + 8 * 1 + 4 * (24 + 32)) * 2


def test_a_pool_that_moves_its_blocks_serves_the_same() -> None:
    small, large = (None, (2,), None, None, None), (None, (9,), None, None, (9,))
    layout = Layout(PROJECTIONS, torch.bfloat16)
    sizes = [layout.pack(_factors(ranks, 0)).bytes for ranks in (small, large)]
    pool = RaggedPool(PROJECTIONS, SLOTS, sizes[0] + sizes[1], torch.bfloat16)
    first, second = _factors(small, 1), _factors(small, 2)
    for slot, factors in enumerate((first, second)):
        pool.load(slot, pool.pack(factors))
    pool.clear(0)
    pool.load(2, pool.pack(_factors(large, 3)))
    assert pool.counters.moves == 1
    _assert_same(_read(pool.tables["0.o"], 1, pool.buffer, PROJECTIONS[1]), second["0.o"])
    _assert_same(_read(pool.tables["1.o"], 2, pool.buffer, PROJECTIONS[4]), _factors(large, 3)["1.o"])


@pytest.mark.gpu
def test_a_load_on_a_gpu_is_in_the_order_of_the_stream() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    layout = Layout(PROJECTIONS, torch.bfloat16)
    full = tuple((9,) * len(its.channels) for its in PROJECTIONS)
    pool = RaggedPool(
        PROJECTIONS, SLOTS, SLOTS * layout.pack(_factors(full, 0)).bytes, torch.bfloat16, "cuda"
    )
    before, after = _factors(full, 1), _factors(full, 2)
    adapters = [pool.pack(before), pool.pack(after)]
    assert all(adapter.data.is_pinned() for adapter in adapters)
    pool.load(1, adapters[0])
    torch.cuda._sleep(50_000_000)  # what follows is queued behind this
    read = pool.buffer.clone(), pool.tables["0.qkv"].tensor.clone()
    pool.load(1, adapters[1])
    torch.cuda.synchronize()
    _assert_same(_read(SlotTable.of(read[1].cpu()), 1, read[0].cpu(), PROJECTIONS[0]), before["0.qkv"])
    found = _read(pool.tables["0.qkv"], 1, pool.buffer, PROJECTIONS[0])
    _assert_same([pair and (pair[0].cpu(), pair[1].cpu()) for pair in found], after["0.qkv"])
