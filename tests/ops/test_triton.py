"""The Triton prefill kernels against the FP64 reference: on a GPU as compiled, elsewhere by Triton's interpreter."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from loraforge import ops
from loraforge.errors import LoraForgeError
from loraforge.ops import plan as plans
from loraforge.ops import reference
from loraforge.ops.choice import Choice, Kernel
from loraforge.ops.slots import Slot, SlotTable, bucket

pytest.importorskip("triton", reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the interpreter multiplies the bits of bfloat16 as integers
DTYPES = [torch.float16] if DEVICE == "cpu" else [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True, scope="module")
def _interpreter() -> None:
    """Triton decides when a kernel is defined whether it is compiled or interpreted."""
    if DEVICE == "cpu":
        before = os.environ.get("TRITON_INTERPRET")
        os.environ["TRITON_INTERPRET"] = "1"
        import loraforge.ops.triton  # noqa: F401

        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


@dataclass
class Case:
    """Operands of one batch whose every unused element is NaN."""

    x: Tensor
    a: Tensor
    b: Tensor
    table: SlotTable
    plan: plans.Plan
    z: Tensor
    y: Tensor
    slices: list[tuple[int, int]]

    def shrunk(self) -> Tensor:
        return reference.shrink(self.x, self.a, self.table, self.plan.token_slots, self.z.shape[3])

    def check_shrink(self, **options: int) -> None:
        """Every live entry agrees, and no other is written."""
        self.z.fill_(torch.nan)
        ops.shrink(self.x, self.a, self.table.tensor, self.plan, self.z, kernel=Kernel("triton", options))
        want = self.shrunk()
        got = self.z.cpu().double()
        assert torch.equal(torch.isnan(got).any(0), torch.isnan(want))
        close(got.sum(0).nan_to_num(), want.nan_to_num(), 1e-4)

    def check_expand(self, **options: int) -> None:
        """Every channel of every slice agrees; base tokens, dead slices and other columns keep their bits."""
        exact = self.shrunk()
        parts = torch.rand(self.z.shape[0], *exact.shape, dtype=torch.float64) + 0.5
        self.z.copy_(exact * parts / parts.sum(0))
        summed = self.z.double().cpu().sum(0)
        want = reference.expand(summed, self.b, self.table, self.plan.token_slots, self.y, self.slices)
        before = self.y.clone()
        ops.expand(
            self.z, self.b, self.table.tensor, self.plan, self.y, self.slices,
            kernel=Kernel("triton", options),
        )  # fmt: skip
        changed = want != before.double().cpu()
        assert torch.equal(self.y.cpu()[~changed], before.cpu()[~changed])
        close(self.y.double().cpu(), want, 4e-3 if self.y.dtype == torch.bfloat16 else 5e-4)


def close(got: Tensor, want: Tensor, bound: float) -> None:
    """Relative L2 within ``bound``, and no element off by more than the protocol allows."""
    assert (got - want).norm() <= bound * want.norm()
    assert (got - want).abs().max() <= 0.025 * max(0.1, float(want.abs().max()))


def case(
    ranks: list[list[int]],
    routing: list[int],
    *,
    d_in: int = 96,
    channels: tuple[int, ...] = (64, 40, 40),
    capacity: int = 64,
    planes: int = 1,
    tile: int = 32,
    dtype: torch.dtype = DTYPES[-1],
    width: int = 0,
) -> Case:
    """``ranks``: a row a slot. ``width``: of every row of B, its bucket where 0."""
    torch.manual_seed(0)
    table = SlotTable(len(ranks), len(ranks[0]))
    slices = [(4 + sum(channels[:p]), channels[p]) for p in range(table.slices)]
    a_parts, b_parts, a_at, b_at = [], [], 0, 0
    for slot, row in enumerate(ranks):
        words = []
        for piece, rank in enumerate(row):
            wide = width or bucket(rank)
            a = torch.full((rank + 1, d_in), torch.nan)
            a[:rank] = torch.randn(rank, d_in) / d_in**0.5
            b = torch.full((channels[piece], wide), torch.nan)
            b[:, :rank] = torch.randn(channels[piece], rank)
            b = torch.cat([b.reshape(-1), torch.full((-b.numel() % 8 + 8,), torch.nan)])
            words.append(Slot(a_at, b_at, rank, wide, 0.5 + slot))
            a_parts.append(a.reshape(-1))
            b_parts.append(b)
            a_at, b_at = a_at + a.numel(), b_at + b.numel()
        table.set(slot, words)
    tokens = len(routing)
    plan = plans.empty_plan(tokens, len(ranks), tile)
    plan.token_slots.copy_(torch.tensor(routing, dtype=torch.int32))
    plans.fill_reference(plan, len(ranks))
    plan.segments[int(plan.count) :] = 10**8  # what follows the live segments is never followed
    x = torch.randn(tokens, 2 * d_in)[:, :d_in] if d_in % 16 == 0 else torch.randn(tokens, d_in)
    y = torch.randn(tokens, 16 * (-(-(sum(channels) + 8) // 16)))
    table.tensor = table.tensor.to(DEVICE)
    moved = plans.Plan(
        *(t.to(DEVICE) for t in (plan.token_slots, plan.order, plan.segments, plan.count)), tile
    )
    z = torch.full((planes, tokens, table.slices, capacity), torch.nan)
    wide_x = torch.full((tokens, x.shape[1] + 16), torch.nan)
    wide_x[:, : x.shape[1]] = x
    return Case(
        wide_x.to(DEVICE, dtype)[:, : x.shape[1]],
        torch.cat(a_parts).to(DEVICE, dtype),
        torch.cat(b_parts).to(DEVICE, dtype),
        table,
        moved,
        z.to(DEVICE),
        y.to(DEVICE, dtype),
        slices,
    )


def ragged(tokens: int, slots: int) -> list[int]:
    """Shuffled tokens, a few of them without an adapter, and one slot with a single token."""
    generator = torch.Generator().manual_seed(1)
    routing = torch.randint(-1, slots - 1, (tokens,), generator=generator).tolist()
    routing[tokens // 2] = slots - 1
    return [int(slot) for slot in routing]


MIXED = [[8, 8, 8], [0, 0, 0], [1, 0, 3], [64, 5, 17], [16, 33, 2]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("planes", [1, 3])
def test_mixed_ranks_of_three_slices(dtype: torch.dtype, planes: int) -> None:
    batch = case(MIXED, ragged(75, 5), planes=planes, dtype=dtype)
    batch.check_shrink(block_m=16, narrow=32, block_n=16, block_k=32)
    batch.check_expand(block_m=16, block_n=32, blocks=2)


@pytest.mark.parametrize("slices", [1, 2])
def test_fewer_slices(slices: int) -> None:
    batch = case([row[:slices] for row in MIXED], ragged(75, 5))
    batch.check_shrink(block_m=32, narrow=16, block_n=64, block_k=32, columns=2)
    batch.check_expand(block_m=32, block_n=16, blocks=1)


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 8, 15, 16, 17, 64, 65, 128])
def test_every_rank_in_a_pool_of_128(rank: int) -> None:
    batch = case([[rank], [128]], ragged(40, 2), capacity=128, width=128, channels=(72,))
    batch.check_shrink(block_m=16, block_n=64, block_k=32)
    batch.check_expand(block_m=16, block_n=32)


@pytest.mark.parametrize("blocks", [1, 2])
def test_many_planes_of_few_rows(blocks: int) -> None:
    batch = case([[100], [128], [40]], ragged(20, 3), capacity=128, channels=(200,), planes=8, tile=16)
    batch.check_shrink(block_m=16, narrow=16, block_n=32, block_k=32, columns=4)
    batch.check_expand(block_m=16, block_n=64, blocks=blocks)


def test_a_tail_of_the_input_and_more_planes_than_steps() -> None:
    batch = case([[5, 9, 3]], [0] * 20, d_in=72, planes=4)
    batch.check_shrink(block_m=32, block_k=32)
    batch.check_shrink(block_m=16, block_k=64)


def test_a_width_that_is_no_multiple_of_eight() -> None:
    batch = case([[7], [12]], ragged(24, 2), width=12, capacity=12, channels=(40,))
    batch.check_expand(block_m=16, block_n=16)


def test_a_batch_without_adapters_is_left_alone() -> None:
    batch = case([[8]], [-1] * 9)
    batch.check_shrink()
    batch.check_expand()


def test_both_through_one_choice() -> None:
    batch = case(MIXED, ragged(50, 5), planes=2)
    want = reference.expand(
        batch.shrunk(), batch.b, batch.table, batch.plan.token_slots, batch.y, batch.slices
    )
    choice = Choice(
        Kernel("triton", {"block_m": 32, "block_n": 16, "block_k": 32}),
        Kernel("triton", {"block_m": 32, "block_n": 32, "blocks": 2}),
        tile=32,
        planes=2,
    )
    ops.lora(
        batch.x,
        batch.a,
        batch.b,
        batch.table.tensor,
        batch.plan,
        batch.z,
        batch.y,
        batch.slices,
        choice=choice,
    )
    close(batch.y.double().cpu(), want, 4e-3 if batch.y.dtype == torch.bfloat16 else 1e-3)


WIDE = {"block_m": 16, "narrow": 16, "block_n": 32, "block_k": 256, "columns": 12, "early": 1}


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [{"block_n": 64}, {"block_n": 128, "registers": 128, "blocks": 2}])
@pytest.mark.parametrize(
    "shrink", [Kernel("triton", WIDE), *(Kernel("direct", {"variant": v}) for v in (7, 12))], ids=str
)
def test_an_expand_that_runs_ahead_sees_what_its_shrink_wrote(
    shrink: Kernel, rows: dict[str, int], dtype: torch.dtype
) -> None:
    """A captured step, again and again on other inputs and another routing."""
    ranks = [[64, 128, 100], [128, 128, 128], [8, 0, 65], [0, 0, 0]]
    batch = case(
        ranks,
        ragged(40, 4),
        d_in=2048,
        channels=(1024, 256, 264),
        capacity=128,
        planes=8,
        tile=16,
        dtype=dtype,
    )
    choice = Choice(shrink, Kernel("triton", {"block_m": 16, "early": 1} | rows), tile=16, planes=8)
    base = batch.y.clone()

    def step() -> None:
        batch.y.copy_(base)
        ops.fill(batch.plan, len(ranks))
        ops.lora(
            *(batch.x, batch.a, batch.b, batch.table.tensor, batch.plan, batch.z, batch.y, batch.slices),
            choice=choice,
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    host = SlotTable(batch.table.slots, batch.table.slices)
    host.tensor.copy_(batch.table.tensor)
    for seed in range(6):
        torch.manual_seed(seed)
        batch.x.copy_(torch.randn(batch.x.shape))
        batch.plan.token_slots.copy_(torch.randint(-1, len(ranks), (40,), dtype=torch.int32))
        batch.z.fill_(torch.nan)
        graph.replay()
        z = reference.shrink(batch.x.cpu(), batch.a.cpu(), host, batch.plan.token_slots.cpu(), 128)
        want = reference.expand(
            z, batch.b.cpu(), host, batch.plan.token_slots.cpu(), base.cpu(), batch.slices
        )
        close(batch.y.double().cpu(), want, 4e-3 if dtype == torch.bfloat16 else 1e-3)


def test_shapes_that_no_program_covers_are_refused() -> None:
    batch = case([[8]], [0] * 9, tile=8)
    with pytest.raises(LoraForgeError, match="programs of 8 rows in segments of 8"):
        batch.check_shrink()
    with pytest.raises(LoraForgeError, match="block_m that divides it"):
        case([[8]], [0] * 9, tile=48).check_expand(block_m=32)
    with pytest.raises(LoraForgeError, match="36 inputs"):
        case([[8]], [0] * 9, d_in=36).check_shrink()
