"""Which kernels a step takes, and the plan and workspace that go with them."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from loraforge.dispatch import table as tables
from loraforge.dispatch.table import Entry, Phase, Table, load_table, steps_path, table_path
from loraforge.ops import reference
from loraforge.ops.choice import NATIVE, Choice, Kernel
from loraforge.runtime.batch import Applied, Batch
from loraforge.runtime.kernels import Kernels
from loraforge.runtime.pool import RaggedPool
from loraforge.runtime.ranks import Projection

DOWN = Projection("model.layers.0.mlp.down_proj", 96, (64,))
FAST = Choice(Kernel("fused"), planes=4)
PAIR = Choice(Kernel("direct"), Kernel("row_expand"), planes=2)
PROMPT = Choice(Kernel("triton"), Kernel("triton"), tile=128)


def _entry(phase: Phase, tokens: int, rank: int, choice: Choice, pair: Choice) -> Entry:
    return Entry(
        phase=phase,
        d_in=96,
        channels=(64,),
        tokens=tokens,
        rank=rank,
        choice=choice.to_json(),
        pair=pair.to_json(),
    )


def _table(*entries: Entry) -> Table:
    return Table.freeze("a device", "a test", list(entries))


TABLE = _table(
    _entry("decode", 32, 8, FAST, PAIR),
    _entry("decode", 32, 64, PAIR, PAIR),
    _entry("decode", 128, 64, NATIVE, PAIR),
    _entry("prefill", 512, 64, NATIVE, NATIVE),
    _entry("prefill", 4096, 64, PROMPT, PROMPT),
)


@pytest.mark.parametrize(
    ("tokens", "rank", "wanted"),
    [
        (1, 4, FAST),
        (32, 8, FAST),
        (32, 9, PAIR),  # above the bucket
        (32, None, PAIR),  # not known: a middling rank
        (100, 8, PAIR),  # native is the engine's, the pair is ours
        (129, 8, Choice(Kernel("triton"), Kernel("triton"), tile=64)),  # both native: what serves any shape
        (9000, 8, PROMPT),
    ],
)
def test_the_table_is_asked_by_phase_tokens_and_rank(tokens: int, rank: int | None, wanted: Choice) -> None:
    ranks = {"qkv_proj": 64} | ({} if rank is None else {"down_proj": rank})
    assert Kernels(TABLE, 1024, ranks, 64).choose(DOWN, tokens) == wanted


def test_a_step_of_more_tokens_than_requests_holds_prompts() -> None:
    assert Kernels(TABLE, 16, {}, 64).choose(DOWN, 17).tile == 64


def test_every_choice_comes_up_to_one_of_the_bounds() -> None:
    kernels = Kernels(TABLE, 300, {}, 64)
    bounds = kernels.bounds(1000)
    assert bounds == [32, 128, 512, 1000]
    for tokens in range(1, 1001):
        bound = next(bound for bound in bounds if bound >= tokens)
        assert kernels.choose(DOWN, tokens) == kernels.choose(DOWN, bound)


def test_buffers_are_large_enough_for_every_choice() -> None:
    for table, rank in product((TABLE, load_table("generic"), load_table("NVIDIA H200")), (1, 8, 64, 200)):
        kernels = Kernels(table, 300, {"down_proj": rank}, 256)
        room, tiles = kernels.planes(9000), kernels.tiles()
        for tokens in (1, 31, 64, 300, 301, 2048, 9000):
            choice = kernels.choose(DOWN, tokens)
            assert choice.planes * tokens <= room
            assert choice.tile in tiles


STEP = Choice(Kernel("fused", {"variant": 612}), planes=2)
MIXED = Choice(Kernel("triton"), Kernel("triton"), tile=32, planes=8)
LONGER = Choice(Kernel("direct"), Kernel("triton"), tile=16)
STEPS = _table(
    _entry("decode", 24, 16, STEP, PAIR),
    _entry("decode", 64, 16, PAIR, PAIR),
    _entry("prefill", 256, 16, MIXED, MIXED),
    _entry("prefill", 2048, 16, NATIVE, LONGER),
    _entry("prefill", 3000, 16, NATIVE, NATIVE),
)


@pytest.mark.parametrize(
    ("requests", "tokens", "rank", "wanted"),
    [
        (1024, 24, 9, STEP),
        (1024, 25, 9, PAIR),
        (1024, 65, 9, MIXED),  # beyond the decodes of steps: one with prompts
        (20, 20, 9, STEP),
        (20, 21, 9, MIXED),
        (1024, 300, 9, LONGER),  # native is no choice of ours
        (1024, 2049, 9, PROMPT),  # nor is there a pair: the device's table
        (1024, 3001, 9, PROMPT),  # beyond the last bucket
        (1024, 24, 17, PAIR),  # above the ranks of steps
    ],
)
def test_steps_are_asked_first_within_their_buckets(
    requests: int, tokens: int, rank: int, wanted: Choice
) -> None:
    kernels = Kernels(TABLE, requests, {"down_proj": rank}, 64, STEPS)
    assert kernels.choose(DOWN, tokens) == wanted
    assert kernels.source == f"a device (table {TABLE.sha256[:12]}, steps {STEPS.sha256[:12]})"


def test_steps_say_nothing_of_other_projections_nor_of_ranks_that_are_not_known() -> None:
    near = Projection(DOWN.name, 104, (64,))
    for ranks, projection in (({"down_proj": 8}, near), ({}, DOWN)):
        with_steps, without = Kernels(TABLE, 64, ranks, 64, STEPS), Kernels(TABLE, 64, ranks, 64)
        for tokens in (1, 24, 64, 65, 2048):
            assert with_steps.choose(projection, tokens) == without.choose(projection, tokens)
            assert with_steps.pair(projection, tokens) == without.pair(projection, tokens)
    assert Kernels(TABLE, 64, {}, 16, STEPS).choose(DOWN, 24) == STEP, "no adapter can be above the bucket"


@pytest.mark.parametrize("requests", [16, 48, 100, 300])
def test_bounds_tiles_and_planes_are_of_both_tables(requests: int) -> None:
    kernels = Kernels(TABLE, requests, {"down_proj": 9}, 64, STEPS)
    bounds, tiles, room = kernels.bounds(4000), kernels.tiles(), kernels.planes(4000)
    assert {24, 32, min(64, requests), 128, 256, 512, 2048, 3000, 4000} <= set(bounds)
    for tokens in range(1, 4001):
        bound = next(bound for bound in bounds if bound >= tokens)
        for ask in (kernels.choose, kernels.pair):
            choice = ask(DOWN, tokens)
            assert choice == ask(DOWN, bound)
            assert choice.tile in tiles
            assert choice.planes * tokens <= room
    assert tiles >= {16, 32, 64, 128}


def test_without_a_table_of_steps_a_device_is_served_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "A Device")
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    TABLE.write(table_path("A Device"))
    kernels = Kernels.of("cuda", 1024, {"down_proj": 9}, 64)
    assert kernels.steps is None
    assert kernels.source == f"a device (table {TABLE.sha256[:12]})"
    assert kernels.bounds(1000) == [32, 128, 512, 1000]
    assert kernels.tiles() == {16, 64, 128}
    assert kernels.choose(DOWN, 24) == PAIR
    STEPS.write(steps_path("A Device"))
    assert Kernels.of("cuda", 1024, {"down_proj": 9}, 64).choose(DOWN, 24) == STEP


def test_all_choices_give_the_same_sums() -> None:
    """The choices of a GPU, carried out by the CPU's kernels: plans of several tiles within one step."""
    cpu, two = Kernel("cpu"), Choice(Kernel("cpu"), Kernel("cpu"), tile=16)
    table = _table(
        _entry("decode", 4, 64, two, two),
        _entry("decode", 64, 64, Choice(cpu, tile=64), two),
        _entry("prefill", 64, 64, Choice(cpu, tile=32), two),
    )
    other = Projection("model.layers.0.self_attn.o_proj", 64, (96,))
    pool = RaggedPool((DOWN, other), 3, 1 << 20, torch.bfloat16)
    make = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make).bfloat16()

    for slot, rank in ((0, 3), (2, 16)):
        pairs = {its.name: [(randn(rank, its.d_in), randn(its.channels[0], rank))] for its in (DOWN, other)}
        pool.load(slot, pool.pack(pairs))
    kernels = Kernels(table, 48, {}, 64)
    batch = Batch(64, 3, 64, tiles=kernels.tiles(), planes=kernels.planes(64))
    for projection in (DOWN, other):
        Applied(pool, batch, projection, kernels).warm()
    for tokens in (3, 40, 64, 3):
        slots = torch.randint(-1, 3, (tokens,), generator=make)
        slots[0] = 2
        batch.set(slots, active=True)
        step = object()
        for projection in (DOWN, other, DOWN):
            x, y = randn(tokens, projection.d_in), randn(tokens, projection.channels[0])
            name = pool.tables[projection.name]
            z = reference.shrink(x, pool.buffer, name, slots, 64)
            oracle = reference.expand(z, pool.buffer, name, slots, y, list(projection.slices))
            Applied(pool, batch, projection, kernels).add(y, x, step)
            assert torch.allclose(y.double(), oracle, rtol=2.0**-8, atol=2.0**-6)


def test_a_plan_is_made_once_a_step_and_again_in_the_next() -> None:
    batch = Batch(8, 2, 8, tiles=(16, 64))
    batch.set(torch.tensor([1, 0, 1]), active=True)
    step = object()
    plan = batch.plan(3, 16, step)
    assert plan.order.tolist() == [1, 0, 2]
    plan.order.zero_()
    assert batch.plan(3, 16, step).order.tolist() == [0, 0, 0]  # not made again
    assert batch.plan(3, 64, step).order.tolist() == [1, 0, 2]  # of another height
    assert batch.plan(3, 16, object()).order.tolist() == [1, 0, 2]  # as a graph does at each replay
    batch.set(torch.tensor([0]), active=True)
    padded = batch.plan(8, 16, step)  # a captured size: what the longer step before wrote is gone
    assert padded.token_slots.tolist() == [0, *[-1] * 7]
    assert int(padded.count) == 1
