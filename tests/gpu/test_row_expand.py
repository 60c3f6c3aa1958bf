"""RowExpand on a real GPU: every rank, layout, variant, tile limit and staging against the FP64 reference."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from loraforge.errors import LoraForgeError
from loraforge.jit import load
from loraforge.ops import cuda, reference
from loraforge.ops.plan import BASE, Plan, empty_plan
from loraforge.ops.slots import Slot, SlotTable, bucket

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = [torch.bfloat16, torch.float16]
SHAPES, DIRECT_SHAPES = (1, 3, 4, 5, 6, 7, 8, 9), (3,)
VARIANTS = [0, *SHAPES, *(shape + 10 for shape in SHAPES), 26]
LIMITS = (1, 4, 8, 16, 32)


@dataclass
class Case:
    """Operands of one projection; every element of B and Z that nobody may use is NaN."""

    z: Tensor
    b: Tensor
    host_table: SlotTable
    table: Tensor
    plan: Plan
    y: Tensor
    slices: list[tuple[int, int]]

    def run(self, limit: int = 16, staged: int = 1, variant: int = 0) -> Tensor:
        """What the kernel makes of a copy of y, in the layout of y."""
        out = torch.empty_strided(self.y.shape, self.y.stride(), dtype=self.y.dtype, device="cuda")
        out.copy_(self.y)
        cuda.expand(self.z, self.b, self.table, self.plan, out, self.slices, limit, staged, variant)
        return out

    def route(self, routing: Tensor) -> None:
        self.plan.token_slots.copy_(routing)
        cuda.fill(self.plan, self.host_table.slots)

    def check(self, got: Tensor) -> None:
        """One rounding from the exact result where a slot is live, the same bits everywhere else."""
        routing = self.plan.token_slots.cpu()
        z = self.z.double().sum(0).cpu()
        want = reference.expand(z, self.b.cpu(), self.host_table, routing, self.y.cpu(), self.slices)
        before, after = self.y.cpu(), got.cpu()
        touched = torch.zeros(before.shape, dtype=torch.bool)
        for token, slot in enumerate(routing.tolist()):
            for piece, (first, channels) in enumerate(self.slices if slot >= 0 else []):
                if self.host_table.row(slot, piece).rank:
                    touched[token, first : first + channels] = True
        assert torch.equal(after[~touched].view(torch.int16), before[~touched].view(torch.int16))
        error = (after.double() - want).abs()[touched]
        half_ulp = torch.finfo(before.dtype).eps / 2
        allowed = half_ulp * want.abs()[touched] * 1.001 + 1e-4 * (1 + want.abs()[touched])
        assert (error <= allowed).all(), float((error / allowed).max())


def make(
    tokens: int,
    ranks: list[list[int]],
    channels: list[int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    layout: str = "compact",
    capacity: int | None = None,
    planes: int = 1,
    tile: int = 16,
    stride: int = 0,
    gap: int = 0,
    share: float = 0.2,
    seed: int = 0,
) -> Case:
    """A batch over slots of ``ranks`` [slots][slices], ``share`` of its tokens without one.

    layout: rows of B as wide as their bucket (``compact``), as the largest bucket (``native``) or as their rank
    (``ragged``). stride: elements a row of y is longer than its columns; gap: columns between slices.
    """
    generator = torch.Generator().manual_seed(seed)
    room = max(bucket(rank) for row in ranks for rank in row)
    room = max(room, 128) if layout == "native" else room
    capacity = capacity or max(1, max(rank for row in ranks for rank in row))
    table = SlotTable(len(ranks), len(channels))
    parts: list[Tensor] = []
    at = 0
    for slot, of_slot in enumerate(ranks):
        rows = []
        for piece, (rank, count) in enumerate(zip(of_slot, channels, strict=True)):
            width = {"compact": bucket(rank), "native": room, "ragged": rank}[layout]
            b = torch.full((count, width), torch.nan)
            b[:, :rank] = torch.randn(count, rank, generator=generator)
            rows.append(Slot(0, at, rank, width, 0.25 + slot / 8 + piece))
            rest = -(count * width) % 8
            parts += [b.reshape(-1), torch.full((rest,), torch.nan)]
            at += count * width + rest
        table.set(slot, rows)
    z = torch.full((planes, tokens, len(channels), capacity), torch.nan)
    routing = torch.randint(0, len(ranks), (tokens,), generator=generator, dtype=torch.int32)
    routing[torch.rand(tokens, generator=generator) < share] = BASE
    for token, slot in enumerate(routing.tolist()):
        for piece, rank in enumerate(ranks[slot] if slot >= 0 else []):
            z[:, token, piece, :rank] = torch.randn(planes, rank, generator=generator)
    slices, first = [], gap
    for count in channels:
        slices.append((first, count))
        first += count + gap
    y = torch.randn(tokens, first + stride, generator=generator).to(dtype).cuda()[:, :first]
    plan = empty_plan(tokens, len(ranks), tile, "cuda")
    case = Case(z.cuda(), torch.cat(parts).to(dtype).cuda(), table, table.tensor.cuda(), plan, y, slices)
    case.route(routing)
    return case


@pytest.mark.parametrize("layout", ["compact", "native", "ragged"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_rank_in_every_layout(dtype: torch.dtype, layout: str) -> None:
    for rank in [*range(1, 65), 65, 96, 128]:
        case = make(24, [[rank], [rank], [max(1, rank - 1)]], [136], dtype=dtype, layout=layout, seed=rank)
        case.check(case.run())


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_tile_limits_and_staging_agree_bit_for_bit(variant: int) -> None:
    ranks = [[3, 16, 1], [8, 0, 2], [64, 33, 5], [12, 128, 31], [0, 0, 0]]
    for tile, dtype, planes in itertools.product((16, 64), DTYPES, (1, 2)):
        case = make(150, ranks, [1032, 264, 520], dtype=dtype, planes=planes, tile=tile)
        first = case.run()
        if variant == 0:
            case.check(first)
        for limit in LIMITS:
            assert torch.equal(case.run(limit, 1, variant), first), (tile, limit)
            if variant % 10 in DIRECT_SHAPES and planes == 1:
                assert torch.equal(case.run(limit, 0, variant), first), (tile, limit, "direct")


@pytest.mark.parametrize("variant", SHAPES)
@pytest.mark.parametrize("planes", [1, 2, 3, 4, 5])
def test_planes_strides_and_gaps(planes: int, variant: int) -> None:
    ranks = [[7, 0], [16, 4], [2, 40]]
    for stride, gap, channels in ((8, 8, [256, 128]), (3, 1, [77, 131]), (0, 2, [70, 1]), (4, 4, [2048, 12])):
        case = make(33, ranks, channels, planes=planes, stride=stride, gap=gap, capacity=45, seed=gap)
        case.check(case.run(variant=variant))


@pytest.mark.parametrize("slots", [1, 50])
def test_real_shapes_of_a_fused_projection(slots: int) -> None:
    ranks = [[1 + (5 * slot + 3 * piece) % 24 for piece in range(3)] for slot in range(slots)]
    for tokens, tile in ((1, 16), (128, 16), (200, 64)):
        case = make(tokens, ranks, [4096, 1024, 1024], tile=tile, share=0.05)
        got = case.run()
        assert torch.equal(got, case.run())
        case.check(got)


def test_a_graph_follows_what_changes_in_place() -> None:
    ranks = [[4, 16], [9, 0], [70, 2]]
    case = make(40, ranks, [512, 256])
    y = case.y.clone()
    slots = case.host_table.slots
    case.run()  # the library is loaded and the occupancy asked outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.copy_(case.y)
        cuda.fill(case.plan, slots)
        cuda.expand(case.z, case.b, case.table, case.plan, y, case.slices)
    generator = torch.Generator().manual_seed(9)
    case.z.copy_(torch.randn(case.z.shape, generator=generator))
    for turn in range(12):
        low = slots - 1 if turn == 3 else -1
        high = 0 if turn == 7 else slots
        routing = torch.randint(min(low, high - 1), high, (40,), generator=generator, dtype=torch.int32)
        case.plan.token_slots.copy_(routing)
        if turn == 5:  # slot 1 gets what slot 0 has, and slot 0 nothing
            case.host_table.tensor[1].copy_(case.host_table.tensor[0])
            case.host_table.clear(0)
            case.table.copy_(case.host_table.tensor)
        graph.replay()
        case.check(y)


def test_a_plan_that_changes_just_before_is_never_taken_for_the_old_one() -> None:
    """The kernel reads the plan ahead of the kernel that writes it, and must notice."""
    case = make(64, [[8, 2], [1, 30], [16, 16], [4, 0]], [2048, 1024])
    case.z.copy_(torch.randn(case.z.shape))
    generator = torch.Generator().manual_seed(3)
    routings = torch.randint(-1, 4, (60, 64), generator=generator, dtype=torch.int32).cuda()
    routings[7], routings[8] = -1, 2
    outputs = [case.y.clone() for _ in routings]
    for routing, y in zip(routings, outputs, strict=True):
        case.plan.token_slots.copy_(routing)
        cuda.fill(case.plan, 4)
        cuda.expand(case.z, case.b, case.table, case.plan, y, case.slices)
    for routing, y in zip(routings, outputs, strict=True):
        case.plan.token_slots.copy_(routing)
        case.check(y)


def test_attributes_and_what_is_not_supported() -> None:
    attributes = load("lora").lf_lora_row_expand_attributes
    attributes.argtypes = [ctypes.c_int] * 3 + [ctypes.POINTER(ctypes.c_int)] * 4
    for shape, staged in itertools.product(SHAPES, (0, 1)):
        values = [ctypes.c_int(-1) for _ in range(4)]
        status = attributes(16, staged, shape, *(ctypes.byref(value) for value in values))
        if not staged and shape not in DIRECT_SHAPES:
            assert status == -1
            continue
        registers, shared, local, blocks = (value.value for value in values)
        assert status == 0
        assert 16 < registers <= 255
        assert shared >= (2 * 16 * 16 * 4 if staged else 1)
        assert local >= 0
        assert blocks >= 2
    case = make(4, [[1]], [8])
    for limit, variant in ((0, 0), (33, 0), (16, 2), (16, 36), (16, -1)):
        with pytest.raises(LoraForgeError, match="unsupported"):
            case.run(limit, 1, variant)
