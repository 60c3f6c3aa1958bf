"""The shadow pool on a GPU: page-locked copies, alignment, captured graphs, and the sums of the ragged pool."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from loraforge.runtime.batch import Applied, Batch
from loraforge.runtime.kernels import Kernels
from loraforge.runtime.packed import Packed
from loraforge.runtime.pool import RaggedPool
from loraforge.runtime.ranks import Factors, Projection
from loraforge.runtime.shadow import ShadowPool, native_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

QKV = Projection("layers.0.qkv_proj", 512, (512, 128, 128))
UP = Projection("layers.0.gate_up_proj", 512, (768, 768))
DOWN = Projection("layers.0.down_proj", 768, (512,))
PROJECTIONS = (QKV, UP, DOWN)
SLOTS, RANK, TOKENS = 5, 64, 300


def _adapter(seed: int) -> dict[str, list[Factors | None]]:
    """Ranks from 0 to 64 in every slice."""
    make = torch.Generator().manual_seed(seed)

    def factors(d_in: int, channels: int) -> Factors | None:
        rank = int(torch.randint(RANK + 1, (1,), generator=make)) >> int(
            torch.randint(6, (1,), generator=make)
        )
        if not rank:
            return None
        a, b = torch.randn(rank, d_in, generator=make), torch.randn(channels, rank, generator=make)
        return a.bfloat16() / 16, b.bfloat16() / 8

    return {its.name: [factors(its.d_in, channels) for channels in its.channels] for its in PROJECTIONS}


class Served:
    """A pool, with all projections applied to fixed inputs."""

    def __init__(self, pool: RaggedPool) -> None:
        kernels = Kernels.of("cuda", requests=64, ranks={}, greatest=RANK)
        self.pool = pool
        self.batch = Batch(TOKENS, SLOTS, RANK, "cuda", tiles=kernels.tiles(), planes=kernels.planes(TOKENS))
        self.applied = [Applied(pool, self.batch, its, kernels) for its in PROJECTIONS]
        make = torch.Generator("cuda").manual_seed(0)
        self.inputs = [
            torch.randn(TOKENS, its.d_in, generator=make, device="cuda").bfloat16() for its in PROJECTIONS
        ]
        self.outputs = [
            torch.zeros(TOKENS, sum(its.channels), dtype=torch.bfloat16, device="cuda") for its in PROJECTIONS
        ]

    def route(self, routing: Sequence[int]) -> None:
        self.batch.set(torch.tensor(routing), active=True)

    def run(self, tokens: int) -> list[Tensor]:
        step = object()
        for applied, x, y in zip(self.applied, self.inputs, self.outputs, strict=True):
            y.zero_()
            applied.add(y[:tokens], x[:tokens], step)
        return [y[:tokens].clone() for y in self.outputs]


def _pools() -> tuple[Served, Served]:
    room = 8 << 20
    whole = native_bytes(PROJECTIONS, SLOTS, RANK, torch.bfloat16) + room
    return (
        Served(ShadowPool(PROJECTIONS, SLOTS, RANK, whole, torch.bfloat16, "cuda")),
        Served(RaggedPool(PROJECTIONS, SLOTS, room, torch.bfloat16, "cuda")),
    )


@pytest.mark.parametrize("tokens", [1, 16, 64, TOKENS])
def test_it_gives_the_sums_of_the_ragged_pool(tokens: int) -> None:
    shadow, ragged = _pools()
    for round_ in range(4):
        for slot in range(SLOTS - 1):
            factors = _adapter(10 * round_ + slot)
            for served in (shadow, ragged):
                served.pool.load(slot, served.pool.pack(factors))
        routing = [place % (SLOTS + 1) - 1 for place in range(tokens)]
        for served in (shadow, ragged):
            served.route(routing)
        for ours, theirs in zip(shadow.run(tokens), ragged.run(tokens), strict=True):
            assert torch.equal(ours, theirs)
    for its, factors in zip(PROJECTIONS, _adapter(30 + SLOTS - 2).values(), strict=True):
        for a, b, pair in zip(*shadow.pool.native(its.name), factors, strict=True):  # type: ignore[attr-defined]
            rank = 0 if pair is None else len(pair[0])
            if pair is not None:
                assert torch.equal(a[SLOTS - 2, 0, :rank].cpu(), pair[0])
                assert torch.equal(b[SLOTS - 2, 0, :, :rank].cpu(), pair[1])
            assert not a[SLOTS - 2, 0, rank:].any()
            assert not b[SLOTS - 2, 0, :, rank:].any()


def test_a_captured_graph_serves_the_adapters_that_are_loaded_later() -> None:
    served, _ = _pools()
    first, second = (served.pool.pack(_adapter(seed)) for seed in (1, 2))
    routing = [0, -1, 1, 0, 1, 1, 2, 0]
    wanted = []
    for adapters in ((first, second), (second, first)):
        _load(served, adapters)
        served.route(routing)
        wanted.append(served.run(len(routing)))
    graph = torch.cuda.CUDAGraph()
    step = object()
    with torch.cuda.graph(graph):
        for applied, x, y in zip(served.applied, served.inputs, served.outputs, strict=True):
            applied.add(y[: len(routing)], x[: len(routing)], step)
    for adapters, outputs in zip(((first, second), (second, first)), wanted, strict=True):
        _load(served, adapters)
        for y in served.outputs:
            y.zero_()
        graph.replay()
        for y, output in zip(served.outputs, outputs, strict=True):
            assert torch.equal(y[: len(routing)], output)


def _load(served: Served, adapters: Sequence[Packed]) -> None:
    for slot, adapter in enumerate(adapters):
        served.pool.load(slot, adapter)
