"""The two products called for apart, as a layer does whose inputs lie on several devices."""

from __future__ import annotations

import torch

from loraforge.runtime.batch import Applied, Batch
from loraforge.runtime.pool import RaggedPool
from loraforge.runtime.ranks import Projection

SHAPE = Projection("layers.0.o_proj", 64, (48,))


def test_partial_sums_of_z_make_the_whole_update() -> None:
    make = torch.Generator().manual_seed(0)
    a, b = torch.randn(5, 128, generator=make).bfloat16(), torch.randn(48, 5, generator=make).bfloat16()
    x = torch.randn(7, 128, generator=make).bfloat16()
    batch = Batch(16, 2, 8)
    batch.set(torch.tensor([1, -1, 1, 1, 0, 1, -1], dtype=torch.int32), active=True)
    halves = []
    for part in (slice(0, 64), slice(64, 128)):  # what two devices have
        pool = RaggedPool([SHAPE], 2, 1 << 16, torch.bfloat16)
        pool.load(1, pool.pack({SHAPE.name: [(a[:, part], b)]}))
        applied = Applied(pool, batch, SHAPE, split=True)
        halves.append(applied.shrink(x[:, part].contiguous(), object()).clone())
    y = torch.zeros(7, 48, dtype=torch.bfloat16)
    applied.expand(y, halves[0] + halves[1], object())
    wanted = (x.double() @ a.double().T) @ b.double().T
    for token, slot in enumerate([1, -1, 1, 1, 0, 1, -1]):
        if slot == 1:
            assert (y[token].double() - wanted[token]).abs().max() <= wanted[token].abs().max() / 128
        else:
            assert not y[token].any()


def test_a_step_without_adapters_leaves_y_alone_and_has_something_to_sum() -> None:
    batch = Batch(16, 2, 8)
    batch.set(torch.full((3,), -1, dtype=torch.int32), active=False)
    applied = Applied(RaggedPool([SHAPE], 2, 1 << 16, torch.bfloat16), batch, SHAPE, split=True)
    z = applied.shrink(torch.ones(3, 64, dtype=torch.bfloat16))
    assert z.numel() > 0
    y = torch.ones(3, 48, dtype=torch.bfloat16)
    applied.expand(y, z)
    assert torch.equal(y, torch.ones_like(y))
