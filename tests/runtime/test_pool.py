"""The ragged pool: what is in it serves exactly, costs what it should, and moves without being noticed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from loraforge.errors import LoraForgeError
from loraforge.ops import reference
from loraforge.runtime.batch import Applied, Batch
from loraforge.runtime.packed import ALIGN_BYTES, Layout
from loraforge.runtime.pool import RaggedPool
from loraforge.runtime.ranks import Factors, Projection

QKV = Projection("layers.0.qkv", 64, (48, 16, 16))
DOWN = Projection("layers.0.down", 96, (64,))
SLOTS = 4


def _factors(projection: Projection, ranks: list[int], seed: int) -> list[Factors | None]:
    make = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(rank, projection.d_in, generator=make).bfloat16() / 8,
            torch.randn(channels, rank, generator=make).bfloat16(),
        )
        if rank
        else None
        for rank, channels in zip(ranks, projection.channels, strict=True)
    ]


def _pool(capacity: int = 1 << 20) -> RaggedPool:
    return RaggedPool((QKV, DOWN), SLOTS, capacity, torch.bfloat16)


def _load(pool: RaggedPool, slot: int, factors: Mapping[str, Sequence[Factors | None]]) -> None:
    pool.load(slot, pool.pack(factors))


def _bytes(projection: Projection, ranks: list[int]) -> int:
    return Layout([projection], torch.bfloat16).bytes({projection.name: ranks})


def _serve(pool: RaggedPool, projection: Projection, routing: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Base outputs, outputs with the adapters of ``routing``, and the FP64 oracle of the latter."""
    batch = Batch(tokens=len(routing) + 3, slots=SLOTS, rank=32)
    slots = torch.tensor(routing)
    batch.set(slots, active=True)
    make = torch.Generator().manual_seed(len(routing))
    x = torch.randn(len(routing), projection.d_in, generator=make).bfloat16()
    base = torch.randn(len(routing), sum(projection.channels), generator=make).bfloat16()
    y = base.clone()
    Applied(pool, batch, projection).add(y, x)
    table = pool.tables[projection.name]
    z = reference.shrink(x, pool.buffer, table, slots, 32)
    return base, y, reference.expand(z, pool.buffer, table, slots, base, list(projection.slices))


def _dense(projection: Projection, factors: list[Factors | None]) -> Tensor:
    return torch.cat(
        [
            torch.zeros(channels, projection.d_in, dtype=torch.float64)
            if pair is None
            else pair[1].double() @ pair[0].double()
            for pair, channels in zip(factors, projection.channels, strict=True)
        ]
    )


def test_adapters_of_all_ranks_and_the_base_model_share_a_batch() -> None:
    pool = _pool()
    held = {slot: _factors(QKV, ranks, slot) for slot, ranks in ((0, [1, 3, 16]), (2, [24, 0, 7]))}
    for slot, factors in held.items():
        _load(pool, slot, {QKV.name: factors})
    routing = [0, -1, 2, 2, 1, 0, -1]
    base, y, oracle = _serve(pool, QKV, routing)
    assert torch.allclose(y.double(), oracle, rtol=2.0**-8, atol=2.0**-8)
    untouched = [token for token, slot in enumerate(routing) if slot not in held]
    assert torch.equal(y[untouched], base[untouched])
    assert not torch.equal(y[0], base[0])
    # what the table describes is what was written
    for slot, factors in held.items():
        for piece, pair in enumerate(factors):
            row = pool.tables[QKV.name].row(slot, piece)
            assert row.rank == (0 if pair is None else len(pair[0]))
            if pair is not None:
                a = pool.buffer[row.a_offset : row.a_offset + pair[0].numel()]
                assert torch.equal(a.view(pair[0].shape), pair[0])
    assert _dense(QKV, held[2])[48:64].abs().sum() == 0


def test_tokens_of_a_step_without_adapters_cost_nothing_and_change_nothing() -> None:
    pool = _pool()
    _load(pool, 0, {DOWN.name: _factors(DOWN, [8], 0)})
    batch = Batch(8, SLOTS, 32)
    batch.set(torch.tensor([0, 0]), active=True)
    batch.set(torch.tensor([-1, -1]), active=False)
    y = torch.ones(2, 64, dtype=torch.bfloat16)
    Applied(pool, batch, DOWN).add(y, torch.ones(2, 96, dtype=torch.bfloat16))
    assert torch.equal(y, torch.ones_like(y))


def test_rows_past_the_step_are_padding() -> None:
    pool = _pool()
    _load(pool, 1, {DOWN.name: _factors(DOWN, [8], 0)})
    batch = Batch(8, SLOTS, 32)
    batch.set(torch.tensor([1, 1]), active=True)
    y = torch.ones(5, 64, dtype=torch.bfloat16)
    Applied(pool, batch, DOWN).add(y, torch.ones(5, 96, dtype=torch.bfloat16))
    assert (y[:2] != 1).any()
    assert torch.equal(y[2:], torch.ones(3, 64, dtype=torch.bfloat16))


def test_bytes_follow_live_ranks() -> None:
    pool = _pool()
    ranks = [2, 0, 5]
    _load(pool, 3, {QKV.name: _factors(QKV, ranks, 0)})
    parameters = 2 * 64 + 48 * 2 + 5 * 64 + 16 * 8  # B of rank 5 lies in rows of 8
    assert _bytes(QKV, ranks) == pool.live_bytes
    assert parameters * 2 <= pool.live_bytes < parameters * 2 + 4 * ALIGN_BYTES
    assert pool.counters.source_bytes == (2 * (64 + 48) + 5 * (64 + 16)) * 2
    pool.clear(3)
    assert pool.live_bytes == 0
    assert pool.tables[QKV.name].tensor.eq(0).all()


def test_a_full_pool_packs_itself_and_serves_the_same() -> None:
    small, large = _bytes(DOWN, [4]), _bytes(DOWN, [8])
    pool = RaggedPool((DOWN,), SLOTS, 3 * small + large - small, torch.bfloat16)
    address, table = pool.buffer.data_ptr(), pool.tables[DOWN.name].tensor.data_ptr()
    for slot in range(3):
        _load(pool, slot, {DOWN.name: _factors(DOWN, [4], slot)})
    _, before, _ = _serve(pool, DOWN, [1, 2, -1])
    pool.clear(0)
    _load(pool, 3, {DOWN.name: _factors(DOWN, [8], 3)})  # needs the hole at the front and the rest at the end
    assert pool.counters.moves == 1
    base, after, oracle = _serve(pool, DOWN, [1, 2, -1])
    assert torch.equal(after, before)
    _, y, oracle = _serve(pool, DOWN, [3, 1, 2, -1, 3])
    assert torch.allclose(y.double(), oracle, rtol=2.0**-8, atol=2.0**-8)
    assert torch.equal(after[2], base[2])
    assert (pool.buffer.data_ptr(), pool.tables[DOWN.name].tensor.data_ptr()) == (address, table)


def test_loading_again_replaces_and_gives_the_same_outputs() -> None:
    pool = _pool()
    first, second = _factors(QKV, [4, 4, 4], 1), _factors(QKV, [9, 1, 0], 2)
    _load(pool, 0, {QKV.name: first})
    held = pool.live_bytes
    _, one, _ = _serve(pool, QKV, [0, -1, 0])
    _load(pool, 0, {QKV.name: second})
    _, two, _ = _serve(pool, QKV, [0, -1, 0])
    _load(pool, 0, {QKV.name: first})
    _, again, _ = _serve(pool, QKV, [0, -1, 0])
    assert torch.equal(one, again)
    assert not torch.equal(one[0], two[0])
    assert pool.live_bytes == held


def test_thousands_of_loads_leak_nothing() -> None:
    pool = RaggedPool((QKV, DOWN), SLOTS, 45_000, torch.bfloat16)
    choose = torch.Generator().manual_seed(0)
    for step in range(1500):
        slot = int(torch.randint(SLOTS, (1,), generator=choose))
        rank = int(torch.randint(1, 13, (1,), generator=choose))
        adapter = {QKV.name: _factors(QKV, [rank, 0, rank], step), DOWN.name: _factors(DOWN, [rank], step)}
        _load(pool, slot, adapter)
    assert pool.report()["adapters"] == SLOTS
    for slot in range(SLOTS):
        pool.clear(slot)
    assert pool.live_bytes == 0


def test_too_small_a_pool_says_what_it_needs() -> None:
    pool = RaggedPool((DOWN,), SLOTS, 1024, torch.bfloat16)
    with pytest.raises(LoraForgeError, match="pool of 1024 bytes has 1024 left, and an adapter needs"):
        _load(pool, 0, {DOWN.name: _factors(DOWN, [8], 0)})
    assert pool.live_bytes == 0
    with pytest.raises(LoraForgeError, match="pool of 10 bytes"):
        RaggedPool((DOWN,), SLOTS, 10, torch.bfloat16)


def test_an_adapter_of_another_model_is_refused() -> None:
    pool = _pool()
    with pytest.raises(LoraForgeError, match=r"layers.0.down: A \[4, 64\] .* 96 inputs"):
        _load(pool, 0, {DOWN.name: [(torch.ones(4, 64), torch.ones(64, 4))]})
    with pytest.raises(LoraForgeError, match="2 slices"):
        _load(pool, 0, {QKV.name: [None, None]})
    with pytest.raises(LoraForgeError, match=r"layers.9.down: no such projection"):
        _load(pool, 0, {"layers.9.down": [None]})
    assert pool.live_bytes == 0
