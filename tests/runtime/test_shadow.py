"""The shadow pool: serves what the ragged pool serves, and keeps the engine's own buffers right beside it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loraforge.errors import LoraForgeError
from loraforge.ops import reference
from loraforge.runtime.batch import Applied, Batch
from loraforge.runtime.pool import RaggedPool
from loraforge.runtime.ranks import Factors, Projection
from loraforge.runtime.shadow import ShadowPool, native_bytes

QKV = Projection("layers.0.qkv", 64, (48, 16, 16))
UP = Projection("layers.0.gate_up", 64, (40, 40))
DOWN = Projection("layers.0.down", 96, (64,))
PROJECTIONS = (QKV, UP, DOWN)
SLOTS, RANK = 4, 24
NATIVE = native_bytes(PROJECTIONS, SLOTS, RANK, torch.bfloat16)

Adapter = dict[str, list[Factors | None]]


def _adapter(ranks: dict[str, tuple[int, ...]], seed: int) -> Adapter:
    make = torch.Generator().manual_seed(seed)
    return {
        its.name: [
            (
                torch.randn(rank, its.d_in, generator=make).bfloat16() / 8,
                torch.randn(channels, rank, generator=make).bfloat16(),
            )
            if rank
            else None
            for rank, channels in zip(ranks[its.name], its.channels, strict=True)
        ]
        for its in PROJECTIONS
        if its.name in ranks
    }


def _shadow(compact: int = 1 << 18) -> ShadowPool:
    return ShadowPool(PROJECTIONS, SLOTS, RANK, NATIVE + compact, torch.bfloat16)


def _ragged() -> RaggedPool:
    return RaggedPool(PROJECTIONS, SLOTS, 1 << 20, torch.bfloat16)


def _serve(pool: RaggedPool, projection: Projection, routing: list[int]) -> tuple[Tensor, Tensor]:
    """Outputs for tokens of ``routing``, and their FP64 oracle."""
    batch = Batch(tokens=len(routing), slots=SLOTS, rank=RANK)
    slots = torch.tensor(routing)
    batch.set(slots, active=True)
    make = torch.Generator().manual_seed(len(routing))
    x = torch.randn(len(routing), projection.d_in, generator=make).bfloat16()
    y = torch.randn(len(routing), sum(projection.channels), generator=make).bfloat16()
    a, b = pool.operands(projection.name)
    table = pool.tables[projection.name]
    z = reference.shrink(x, a, table, slots, RANK)
    oracle = reference.expand(z, b, table, slots, y, list(projection.slices))
    Applied(pool, batch, projection).add(y, x)
    return y, oracle


def _holds(pool: ShadowPool, slot: int, adapter: Adapter) -> None:
    """The engine's buffers of a slot: the adapter, and zeros."""
    for its in PROJECTIONS:
        pairs = adapter.get(its.name, [None] * len(its.channels))
        for a, b, pair in zip(*pool.native(its.name), pairs, strict=True):
            wanted_a, wanted_b = torch.zeros_like(a[slot, 0]), torch.zeros_like(b[slot, 0])
            if pair is not None:
                rank = len(pair[0])
                wanted_a[:rank], wanted_b[:, :rank] = pair
            assert torch.equal(a[slot, 0], wanted_a)
            assert torch.equal(b[slot, 0], wanted_b)


_RANKS = st.integers(0, RANK)
_ADAPTERS = st.fixed_dictionaries(
    {},
    optional={its.name: st.tuples(*[_RANKS] * len(its.channels)) for its in PROJECTIONS},
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, SLOTS - 1), st.none() | _ADAPTERS), min_size=1, max_size=10),
    st.lists(st.integers(-1, SLOTS - 1), min_size=1, max_size=12),
)
def test_it_serves_what_the_ragged_pool_serves(
    changes: list[tuple[int, dict[str, tuple[int, ...]] | None]], routing: list[int]
) -> None:
    shadow, ragged = _shadow(), _ragged()
    held = dict[int, Adapter]()
    for seed, (slot, ranks) in enumerate(changes):
        if ranks is None:
            held.pop(slot, None)
            shadow.clear(slot)
            ragged.clear(slot)
            continue
        held[slot] = _adapter(ranks, seed)
        shadow.load(slot, shadow.pack(held[slot]))
        ragged.load(slot, ragged.pack(held[slot]))
    for its in PROJECTIONS:
        y, oracle = _serve(shadow, its, routing)
        assert torch.equal(y, _serve(ragged, its, routing)[0])
        assert torch.allclose(y.double(), oracle, rtol=2.0**-7, atol=2.0**-7)
    for slot in range(SLOTS):
        _holds(shadow, slot, held.get(slot, {}))
    assert vars(shadow.counters) == vars(ragged.counters)


def test_an_adapter_that_comes_back_serves_as_before_from_the_same_addresses() -> None:
    pool = _shadow()
    first = pool.pack(_adapter({QKV.name: (9, 3, 1), DOWN.name: (16,)}, 0))
    operands = {its.name: [part.data_ptr() for part in pool.operands(its.name)] for its in PROJECTIONS}
    tables = {name: table.tensor.data_ptr() for name, table in pool.tables.items()}
    pool.load(1, first)
    before, _ = _serve(pool, QKV, [1, -1, 1])
    pool.load(1, pool.pack(_adapter({UP.name: (24, 2), QKV.name: (1, 0, 24)}, 1)))
    between, _ = _serve(pool, QKV, [1, -1, 1])
    pool.clear(1)
    pool.load(1, first)
    after, _ = _serve(pool, QKV, [1, -1, 1])
    assert torch.equal(before, after)
    assert not torch.equal(before[0], between[0])
    assert {
        its.name: [part.data_ptr() for part in pool.operands(its.name)] for its in PROJECTIONS
    } == operands
    assert {name: table.tensor.data_ptr() for name, table in pool.tables.items()} == tables


def test_a_full_compact_buffer_packs_itself() -> None:
    small, large = (_adapter({DOWN.name: (rank,)}, rank) for rank in (4, 8))
    sizes = [_shadow().size(_shadow().pack(adapter)) for adapter in (small, large)]
    assert sizes == [64 * 4 * 2, 64 * 8 * 2]  # channels, width, bytes
    pool = _shadow(sizes[0] * 2 + sizes[1])
    for slot in range(3):
        pool.load(slot, pool.pack(_adapter({DOWN.name: (4,)}, slot)))
    before, _ = _serve(pool, DOWN, [1, 2, -1])
    pool.clear(0)
    pool.load(3, pool.pack(large))  # needs the hole at the front and the rest at the end
    assert pool.counters.moves == 1
    assert torch.equal(_serve(pool, DOWN, [1, 2, -1])[0], before)
    y, oracle = _serve(pool, DOWN, [3, 1, 2, -1, 3])
    assert torch.allclose(y.double(), oracle, rtol=2.0**-7, atol=2.0**-7)
    _holds(pool, 3, large)


def test_what_the_engines_kernels_take_is_contiguous_and_slices_share_a_tensor() -> None:
    pool = _shadow()
    a, b = pool.native(QKV.name)
    assert [tuple(part.shape) for part in a] == [(SLOTS, 1, RANK, 64)] * 3
    assert [tuple(part.shape) for part in b] == [(SLOTS, 1, channels, RANK) for channels in QKV.channels]
    assert all(part.is_contiguous() for part in (*a, *b))
    assert len({part.untyped_storage().data_ptr() for part in a}) == 1


def test_bytes_are_the_engines_and_the_compact_ones() -> None:
    pool = _shadow(1 << 16)
    buffers = {
        part.data_ptr(): part.nbytes for its in PROJECTIONS for side in pool.native(its.name) for part in side
    }
    assert sum(buffers.values()) == NATIVE
    assert (pool.capacity_bytes, pool.live_bytes) == (NATIVE + (1 << 16), NATIVE)
    adapter = pool.pack(_adapter({QKV.name: (2, 0, 5)}, 0))
    pool.load(0, adapter)
    assert pool.live_bytes - NATIVE == pool.size(adapter) == (48 * 2 + 16 * 8) * 2  # B of rank 5 in rows of 8
    assert pool.report()["native_bytes"] == NATIVE
    assert pool.device_bytes == pool.capacity_bytes + sum(
        table.tensor.nbytes for table in pool.tables.values()
    )
    assert pool.counters.source_bytes == (2 * (64 + 48) + 5 * (64 + 16)) * 2


def test_thousands_of_loads_leak_nothing() -> None:
    pool = _shadow(SLOTS * (48 + 16 + 16 + 64) * 16 * 2)
    choose = torch.Generator().manual_seed(0)
    adapters = [_adapter({QKV.name: (rank, 0, rank), DOWN.name: (rank,)}, rank) for rank in range(1, 17)]
    packed = [pool.pack(adapter) for adapter in adapters]
    held = dict[int, Adapter]()
    for _ in range(2000):
        slot, number = (int(torch.randint(most, (1,), generator=choose)) for most in (SLOTS, len(packed)))
        pool.load(slot, packed[number])
        held[slot] = adapters[number]
    for slot, adapter in held.items():
        _holds(pool, slot, adapter)
        pool.clear(slot)
        _holds(pool, slot, {})
    assert pool.live_bytes == NATIVE


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(LoraForgeError, match=f"4 slots of rank 24 take {NATIVE} before any compact B"):
        _shadow(0)
    pool = _shadow(1024)
    with pytest.raises(LoraForgeError, match="an adapter needs 2048"):
        pool.load(2, pool.pack(_adapter({DOWN.name: (16,)}, 0)))
    _holds(pool, 2, {})
    with pytest.raises(LoraForgeError, match="rank: an adapter of rank 25 for slots of 24"):
        pool.load(2, pool.pack(_adapter({DOWN.name: (25,)}, 0)))
