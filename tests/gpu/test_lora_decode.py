"""Plan, decode shrink and both products in one call on a real GPU, against the FP64 reference."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from loraforge.errors import LoraForgeError
from loraforge.ops import cuda, reference
from loraforge.ops.plan import BASE, Plan, capacity, empty_plan, fill_reference
from loraforge.ops.slots import Slot, SlotTable, bucket

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = [torch.bfloat16, torch.float16]
DIRECT, SEGMENTED = list(cuda.DIRECT), [11, 12, 14, 16]
BOTH = [0, 301, 105, 407, 611, 1411, 512, 714, 816, 911]  # of shrink + 100 times of RowExpand
RANKS = [0, 1, 2, 3, 4, 5, 8, 12, 16, 17, 24, 31, 32, 40, 64, 65, 100, 128]


@dataclass
class Case:
    """Operands of one projection: every element that nobody may use is NaN."""

    x: Tensor
    a: Tensor
    b: Tensor
    table: SlotTable
    plan: Plan
    z: Tensor
    y: Tensor
    slices: list[tuple[int, int]]

    @property
    def host_table(self) -> SlotTable:
        table = SlotTable(self.table.slots, self.table.slices)
        table.tensor.copy_(self.table.tensor)
        return table

    def shrink(self, variant: int) -> None:
        cuda.shrink(self.x, self.a, self.table.tensor, self.plan, self.z, variant)

    def lora(self, variant: int) -> None:
        cuda.lora(
            *(self.x, self.a, self.b, self.table.tensor, self.plan, self.z, self.y, self.slices),
            variant,
        )

    def expected(self) -> tuple[Tensor, Tensor]:
        """Z and Y in FP64, from the present operands."""
        routing = self.plan.token_slots.cpu()
        routing = torch.where(routing < self.table.slots, routing, BASE)
        table = self.host_table
        z = reference.shrink(self.x.cpu(), self.a.cpu(), table, routing, self.z.shape[3])
        return z, reference.expand(z, self.b.cpu(), table, routing, self.y.cpu(), self.slices)


def make(
    tokens: int,
    ranks: list[list[int]],
    d_in: int,
    channels: list[int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    layout: str = "native",
    planes: int = 1,
    seed: int = 0,
    share: float = 0.2,
    padding: int = 0,
) -> Case:
    """A batch over slots of ``ranks`` [slots][slices]; ``share`` of its tokens have none.

    layout: ``native`` (every row as wide as the largest rank), ``compact`` (as its bucket), or ``ragged`` (as its
    rank). padding: columns of x and y beside the ones that are used.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    slots, slices = len(ranks), len(channels)
    room = max(1, max(max(row) for row in ranks))
    table = SlotTable(slots, slices)
    parts_a: list[Tensor] = []
    parts_b: list[Tensor] = []
    at_a = at_b = 0
    for slot, of_slot in enumerate(ranks):
        rows = []
        for rank, count in zip(of_slot, channels, strict=True):
            width = {"native": room, "compact": bucket(rank), "ragged": rank}[layout]
            a = torch.full((room, d_in), torch.nan, dtype=dtype)
            a[:rank] = normal(rank, d_in)
            b = torch.full((count, width), torch.nan, dtype=dtype)
            b[:, :rank] = normal(count, rank)
            if (width * count) % 8:  # the next one starts where a row may start
                b = torch.cat([b.reshape(-1), torch.full((8 - width * count % 8,), torch.nan, dtype=dtype)])
            rows.append(Slot(at_a, at_b, rank, width, 0.5 + slot / 8 + len(rows)))
            parts_a.append(a)
            parts_b.append(b.reshape(-1))
            at_a, at_b = at_a + a.numel(), at_b + b.numel()
        table.set(slot, rows)
    device_table = SlotTable(slots, slices, "cuda")
    device_table.tensor.copy_(table.tensor)

    plan = empty_plan(tokens, slots, 16, "cuda")
    routing = torch.randint(0, slots, (tokens,), generator=generator, dtype=torch.int32)
    routing[torch.rand(tokens, generator=generator) < share] = BASE
    plan.token_slots.copy_(routing)
    cuda.fill(plan, slots)

    first, extents = padding, []
    for count in channels:
        extents.append((first, count))
        first += count + padding
    x = torch.full((tokens, d_in + 8 * padding), torch.nan, dtype=dtype)
    x[:, 8 * padding :] = normal(tokens, d_in)
    y = normal(tokens, first)
    return Case(
        x.cuda()[:, 8 * padding :],
        torch.cat(parts_a).cuda(),
        torch.cat(parts_b).cuda(),
        device_table,
        plan,
        torch.full((planes, tokens, slices, room), torch.nan, device="cuda"),
        y.cuda(),
        extents,
    )


def mixed(slots: int, slices: int) -> list[list[int]]:
    return [
        [RANKS[(5 * slot + 7 * piece + 3) % len(RANKS)] for piece in range(slices)] for slot in range(slots)
    ]


def check_z(case: Case, z: Tensor) -> None:
    """Live entries agree with the reference, all others are as they were."""
    want, _ = case.expected()
    live = ~torch.isnan(want)
    assert torch.equal(torch.isnan(z.cpu()), (~live).expand_as(z))
    got = z.double().cpu().sum(0)
    error = (got - want)[live].abs().max() if live.any() else torch.zeros(())
    assert error <= 1e-5 * (1 + (want[live].abs().max() if live.any() else 0))


def check_y(case: Case, before: Tensor) -> None:
    """Y agrees with the reference to one rounding and a little; columns and tokens without an update are untouched."""
    after = case.y.clone()
    case.y.copy_(before)
    _, want = case.expected()
    case.y.copy_(after)
    got, unit = after.double().cpu(), 2.0 ** (-8 if after.dtype == torch.bfloat16 else -11)
    assert torch.isfinite(got).all()
    assert ((got - want).abs() <= 1.01 * unit * want.abs() + 2e-4 * unit * want.abs().max()).all()
    untouched = want == before.double().cpu()
    assert torch.equal(after.cpu()[untouched], before.cpu()[untouched])


@pytest.mark.parametrize("tile", [1, 16, 128])
@pytest.mark.parametrize(
    ("tokens", "slots"),
    [(1, 1), (31, 4), (33, 70), (128, 50), (256, 1), (1000, 300), (8192, 50), (8192, 1500)],
)
def test_the_plan_is_the_reference(tokens: int, slots: int, tile: int) -> None:
    plan, want = (empty_plan(tokens, slots, tile, device) for device in ("cuda", "cpu"))
    routing = torch.randint(-2, slots + 2, (tokens,), generator=torch.Generator().manual_seed(tokens))
    for one in (plan, want):
        one.token_slots.copy_(routing)
    fill_reference(want, slots)
    cuda.fill(plan, slots)
    count = int(want.count)
    assert int(plan.count) == count
    assert torch.equal(plan.segments[:count].cpu(), want.segments[:count])
    live = int(((routing >= 0) & (routing < slots)).sum())
    assert torch.equal(plan.order[:live].cpu(), want.order[:live])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("planes", [1, 3])
@pytest.mark.parametrize("variant", [0, *DIRECT, *SEGMENTED])
def test_shrink(variant: int, planes: int, dtype: torch.dtype) -> None:
    case = make(75, mixed(9, 3), 1000, [8, 8, 8], dtype=dtype, planes=planes, padding=1)
    case.shrink(variant)
    check_z(case, case.z)


@pytest.mark.parametrize("variant", [0, *DIRECT, *SEGMENTED])
@pytest.mark.parametrize(("tokens", "slots", "d_in"), [(1, 1, 8), (3, 2, 72), (40, 1, 2560), (64, 30, 4096)])
def test_shrink_over_shapes(variant: int, tokens: int, slots: int, d_in: int) -> None:
    case = make(tokens, mixed(slots, 2), d_in, [8, 8], seed=tokens)
    case.shrink(variant)
    check_z(case, case.z)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["native", "compact", "ragged"])
@pytest.mark.parametrize("variant", BOTH)
def test_both_products(variant: int, layout: str, dtype: torch.dtype) -> None:
    case = make(90, mixed(len(RANKS), 3), 520, [600, 64, 300], dtype=dtype, layout=layout, planes=2)
    before = case.y.clone()
    case.lora(variant)
    check_y(case, before)


@pytest.mark.parametrize("variant", [0, 105, 412])
@pytest.mark.parametrize("padding", [1, 2])
def test_both_products_in_views_with_odd_columns(variant: int, padding: int) -> None:
    case = make(50, mixed(7, 3), 264, [37, 515, 1], padding=padding, seed=3)
    before = case.y.clone()
    case.lora(variant)
    check_y(case, before)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("variant", [0, 412])
def test_both_products_at_one_rank(variant: int, rank: int) -> None:
    case = make(70, [[rank], [rank], [rank]], 2560, [640], seed=rank, layout="compact", share=0.0)
    before = case.y.clone()
    case.lora(variant)
    check_y(case, before)


@pytest.mark.parametrize("variant", [0, 105])
def test_batches_without_work_touch_nothing(variant: int) -> None:
    case = make(20, mixed(4, 2), 64, [32, 32], share=1.0)
    before = case.y.clone()
    case.shrink(0)
    case.lora(variant)
    assert torch.equal(case.y, before)
    assert torch.isnan(case.z).all()
    assert int(case.plan.count) == 0
    empty = make(0, mixed(4, 2), 64, [32, 32])
    empty.shrink(0)
    empty.lora(variant)


@pytest.mark.parametrize("variant", BOTH)
def test_graphs_replay_after_every_change_in_place(variant: int) -> None:
    ranks = mixed(12, 2)
    case = make(100, ranks, 512, [256, 128], layout="native")
    base = case.y.clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        cuda.fill(case.plan, 12)
        case.lora(variant)  # loads the library outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        cuda.fill(case.plan, 12)
        case.lora(variant)
    room = case.z.shape[3]
    for step in range(4):
        routing = torch.randint(
            -1, 12, (100,), generator=torch.Generator().manual_seed(step), dtype=torch.int32
        )
        case.plan.token_slots.copy_(routing if step < 3 else torch.full_like(routing, BASE))
        for slot in range(12):
            row = case.table.row(slot, 1)  # another adapter: fewer directions, another scale
            case.table.set(
                slot, [case.table.row(slot, 0), Slot(row.a_offset, row.b_offset, row.rank // 2, room, -1)]
            )
        case.y.copy_(base)
        graph.replay()
        check_y(case, base)


@pytest.mark.parametrize("variant", BOTH)
def test_results_repeat_bit_for_bit(variant: int) -> None:
    case = make(128, mixed(50, 3), 2560, [1024, 256, 256], planes=2)
    base, seen = case.y.clone(), None
    for _ in range(50):
        case.y.copy_(base)
        case.lora(variant)
        seen = case.y.clone() if seen is None else seen
        assert torch.equal(case.y, seen)


@pytest.mark.parametrize("variant", [*DIRECT, *SEGMENTED])
def test_shrink_repeats_bit_for_bit(variant: int) -> None:
    case = make(128, mixed(50, 3), 2560, [8, 8, 8], planes=2)
    case.shrink(variant)
    seen = case.z.clone()
    for _ in range(20):
        case.z.fill_(torch.nan)
        case.shrink(variant)
        assert torch.equal(case.z.view(torch.int32), seen.view(torch.int32))


@pytest.mark.parametrize("variant", [0, 612, 405])
@pytest.mark.parametrize("tokens", [1, 64])
def test_a_plan_that_changes_just_before_is_never_taken_for_the_old_one(tokens: int, variant: int) -> None:
    """Kernels read the plan ahead of the kernel that writes it, and must notice."""
    case = make(tokens, [[8, 2], [1, 30], [16, 16], [4, 0]], 2560, [2048, 1024])
    generator = torch.Generator().manual_seed(3)
    routings = torch.randint(-1, 4, (60, tokens), generator=generator, dtype=torch.int32).cuda()
    routings[7], routings[8] = -1, 2
    base = case.y.clone()
    outputs = [base.clone() for _ in routings]
    for routing, y in zip(routings, outputs, strict=True):
        case.plan.token_slots.copy_(routing)
        cuda.fill(case.plan, 4)
        case.y = y
        case.lora(variant)
    for routing, y in zip(routings, outputs, strict=True):
        case.plan.token_slots.copy_(routing)
        case.y = y
        check_y(case, base)


def test_projections_follow_each_other_through_one_output() -> None:
    """A call may start before the one before it is done, and adds to what that one wrote."""
    case = make(128, mixed(50, 2), 512, [1024, 512], share=0.0)
    base = case.y.clone()
    stepwise = base.clone()
    for _ in range(6):
        case.y = stepwise
        case.lora(611)
        torch.cuda.synchronize()
    at_once = base.clone()
    case.y = at_once
    for _ in range(6):
        case.lora(611)
    assert torch.equal(at_once, stepwise)
    assert not torch.equal(at_once, base)


def test_what_a_kernel_cannot_do_is_refused() -> None:
    case = make(20, mixed(4, 1), 64, [32])
    with pytest.raises(LoraForgeError, match="unsupported"):
        case.shrink(99)
    with pytest.raises(LoraForgeError, match="rows are not aligned"):
        cuda.shrink(case.x[:, 1:], case.a, case.table.tensor, case.plan, case.z)
    for variant in (99, 9900, -1):
        with pytest.raises(LoraForgeError, match="unsupported"):
            case.lora(variant)
    tall = empty_plan(20, 4, 64, "cuda")
    with pytest.raises(LoraForgeError, match="tile"):
        cuda.shrink(case.x, case.a, case.table.tensor, tall, case.z, 11)
    assert capacity(20, 4, 64) == tall.segment_capacity
