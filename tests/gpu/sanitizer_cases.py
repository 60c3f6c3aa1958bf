"""Every kernel once or a few times at small, odd sizes, for compute-sanitizer: see run_sanitizer.sh.

Inputs come by copies from the host and outputs are not initialised, so that all a kernel may read is known to the
tools and all it should write is seen to be written. Results are compared loosely: the tests are where accuracy is held.
A new launcher needs an entry in ``CASES``.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch

from loraforge.errors import LoraForgeError
from loraforge.factor.gpu.ops import TALL, WIDE, Emulated, Kernels
from loraforge.jit import KERNELS, load
from loraforge.ops import cuda, reference
from loraforge.ops.plan import BASE, Plan, empty_plan, fill_reference
from loraforge.ops.slots import Slot, SlotTable, bucket

# (m, d, r): one tile and many, partial tiles, ranks of every template, matrices that are split over a cluster
STACKS = [
    (2, 37, 5),
    (3, 64, 16),
    (1, 2048, 16),
    (2, 130, 33),
    (1, 1024, 64),
    (2, 300, 96),
    (1, 600, 128),
    (1, 500, 160),
]
ORDERS = [1, 2, 7, 16, 33, 64, 128, 160]
HOST = Emulated()


def inputs(m: int, d: int, r: int, layout: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A stack on the host and its copy on the device."""
    generator = torch.Generator().manual_seed(m + d + r)
    size = (m, d, r) if layout == TALL else (m, r, d)
    x = torch.randn(size, generator=generator).to(dtype)
    return x, x.cuda()


def empty(*size: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """An output on the host and one on the device."""
    return torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype, device="cuda")


def same(wanted: torch.Tensor, got: torch.Tensor, limit: float) -> None:
    wanted, got = wanted.double(), got.cpu().double()
    assert (got - wanted).abs().max() <= limit * wanted.abs().max(), (tuple(wanted.shape), limit)


def stacks() -> list[tuple[int, int, int, int, torch.dtype]]:
    """All shapes in both layouts; other types than FP32 on two of them."""
    found = []
    for layout in (TALL, WIDE):
        found += [(*stack, layout, torch.float32) for stack in STACKS]
        found += [(*STACKS[i], layout, dtype) for i in (0, 4) for dtype in (torch.float16, torch.bfloat16)]
    return found


def gram(kernels: Kernels) -> None:
    for m, d, r, layout, dtype in stacks():
        x, there = inputs(m, d, r, layout, dtype)
        wanted, got = empty(m, r, r, dtype=torch.float64)
        HOST.gram(x, layout, wanted)
        kernels.gram(there, layout, got)
        same(wanted, got, 1e-12)


def apply(kernels: Kernels) -> None:
    for m, d, r, layout, dtype in stacks():
        x, there = inputs(m, d, r, layout, dtype)
        for k in {1, r}:
            t = torch.ones(m, r, k, dtype=torch.float64)
            wanted, got = empty(m, d, k) if layout == TALL else empty(m, k, d)
            HOST.apply(x, layout, t, wanted)
            kernels.apply(there, layout, t.cuda(), got)
            same(wanted, got, 1e-5)


def tsqr(kernels: Kernels) -> None:
    for m, d, r, layout, dtype in stacks():
        x, there = inputs(m, d, r, layout, dtype)
        _, upper = empty(m, r, r)
        held = kernels.tsqr_factor(there, layout, upper)
        for k in {1, r}:  # Q R, and its first column
            c = upper.cpu()[:, :, :k].contiguous()
            _, back = empty(m, d, k) if layout == TALL else empty(m, k, d)
            kernels.tsqr_apply(held, c.cuda(), layout, back)
            same(x[:, :, :k] if layout == TALL else x[:, :k], back, 1e-4)


def jacobi(kernels: Kernels) -> None:
    for n in ORDERS:
        x = torch.randn(3, 2 * n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
        g = x.mT @ x
        there = g.cuda()
        (_, w), (_, v) = empty(3, n, dtype=torch.float64), empty(3, n, n, dtype=torch.float64)
        _, sweeps = empty(3, dtype=torch.int32)
        # not eigh: torch turns its signs, and what torch's kernels write is not seen to be written
        pointers = (tensor.data_ptr() for tensor in (there, w, v, sweeps))
        kernels._call("lf_jacobi", *pointers, 3, n)
        columns = v.cpu()
        same(g, columns @ (w.cpu()[:, :, None] * columns.mT), 1e-10)
        assert (sweeps.cpu() >= 0).all()


@dataclass(frozen=True)
class Batch:
    """A serving batch on the device, all of it copied from the host, with its host table, plan and exact results.

    Ranks of every bucket, one past the last, slices without any, tokens without a slot, and no element of B past its
    last row: what may not be used is NaN.
    """

    x: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    table: torch.Tensor
    plan: Plan
    host_plan: Plan
    y: torch.Tensor
    wanted_z: torch.Tensor
    wanted_y: torch.Tensor

    def z(self, planes: int = 1, *, given: bool = False) -> torch.Tensor:
        """Z of NaN for a shrink to fill, or what it should have filled in."""
        first = self.wanted_z if given else torch.full_like(self.wanted_z, torch.nan)
        rest = torch.where(first.isnan(), torch.nan, 0.0)
        return torch.stack([first, *[rest] * (planes - 1)]).float().cuda()

    def holds_z(self, z: torch.Tensor) -> None:
        got, live = z.cpu().double().sum(0), ~self.wanted_z.isnan()
        assert (got.isnan() == ~live).all(), "entries past the rank are written, or live ones are not"
        same(self.wanted_z[live], got[live], 1e-4)

    def holds_y(self, y: torch.Tensor) -> None:
        same(self.wanted_y, y, 2e-2)


RANKS = [[3, 16, 1], [8, 0, 2], [64, 33, 5], [12, 130, 31]]
CAPACITY = 132  # rows of Z are multiples of 16 bytes, as unstaged kernels want them
SLICES = [(0, 72), (72, 24), (96, 41)]


@cache
def batch(tokens: int, tile: int, dtype: torch.dtype = torch.bfloat16, d_in: int = 520) -> Batch:
    generator = torch.Generator().manual_seed(tokens)
    table, a, b = SlotTable(len(RANKS), len(SLICES)), [], []
    at_a = at_b = 0
    for slot, ranks in enumerate(RANKS):
        rows = []
        for rank, (_, channels) in zip(ranks, SLICES, strict=True):
            width = bucket(rank)
            row = torch.full((channels, width), torch.nan)
            row[:, :rank] = torch.randn(channels, rank, generator=generator)
            gap = torch.full((-(channels * width) % 8,), torch.nan)
            rows.append(Slot(at_a, at_b, rank, width, 0.5 + slot))
            a.append(torch.randn(rank * d_in, generator=generator) / 16)
            b += [row.reshape(-1), gap]
            at_a, at_b = at_a + rank * d_in, at_b + row.numel() + gap.numel()
        table.set(slot, rows)
    routing = torch.randint(BASE, len(RANKS), (tokens,), generator=generator, dtype=torch.int32)
    routing[0] = len(RANKS) - 1
    host = empty_plan(tokens, len(RANKS), tile)
    host.token_slots.copy_(routing)
    there = Plan(*(each.cuda() for each in (host.token_slots, host.order, host.segments, host.count)), tile)
    fill_reference(host, len(RANKS))
    x, y = (torch.randn(tokens, wide, generator=generator).to(dtype) for wide in (d_in, 137))
    factor_a, factor_b = torch.cat(a).to(dtype), torch.cat(b).to(dtype)
    z = reference.shrink(x, factor_a, table, routing, CAPACITY)
    return Batch(
        *(x.cuda(), factor_a.cuda(), factor_b.cuda(), table.tensor.cuda(), there, host, y.cuda(), z),
        reference.expand(z, factor_b, table, routing, y, SLICES),
    )


def filled(made: Batch) -> Batch:
    """The batch with its plan as the reference fills it, copied."""
    host = made.host_plan
    for name in ("order", "segments", "count"):
        getattr(made.plan, name).copy_(getattr(host, name))
    return made


def runs(call: Callable[[int], object], numbers: Iterator[int] | range) -> list[int]:
    """Call with each variant that there is; their numbers."""
    found = []
    for number in numbers:
        try:
            call(number)
        except LoraForgeError as error:
            if "unsupported" not in str(error):
                raise
        else:
            found.append(number)
    return found


def lora_plan(_: Kernels) -> None:
    for tokens, tile in ((1, 16), (45, 16), (45, 1), (300, 64)):
        made = batch(tokens, tile)
        cuda.fill(made.plan, len(RANKS))
        count = int(made.host_plan.count)
        assert int(made.plan.count.cpu()) == count
        assert torch.equal(made.plan.segments.cpu()[:count], made.host_plan.segments[:count])


def lora_shrink(_: Kernels) -> None:
    for made, planes in _batches():

        def call(variant: int, made: Batch = made, planes: int = planes) -> None:
            z = made.z(planes)
            cuda.shrink(made.x, made.a, made.table, made.plan, z, variant)
            made.holds_z(z)

        assert runs(call, range(100))[:1] == [0]


def lora_row_expand(_: Kernels) -> None:
    for made, planes in _batches():
        for limit, staged in ((16, 1), (4, 1), (16, 0)):

            def call(
                variant: int,
                made: Batch = made,
                planes: int = planes,
                limit: int = limit,
                staged: int = staged,
            ) -> None:
                z, y = made.z(planes, given=True), made.y.cpu().cuda()
                cuda.expand(z, made.b, made.table, made.plan, y, SLICES, limit, staged, variant)
                made.holds_y(y)

            found = runs(call, range(100))
            assert found[:1] == [0] or not staged
    attributes = load("lora").lf_lora_row_expand_attributes
    values = [ctypes.c_int() for _ in range(4)]
    assert attributes(8, 1, 0, *map(ctypes.byref, values)) == 0


def lora_fused(_: Kernels) -> None:
    """By number, and by hundreds where a number stands for a shrink and a hundred for an expand."""
    for made, planes in _batches():

        def call(hundred: int, number: int, made: Batch = made, planes: int = planes) -> None:
            z, y = made.z(planes), made.y.cpu().cuda()
            cuda.lora(*(made.x, made.a, made.b, made.table, made.plan, z, y, SLICES), 100 * hundred + number)
            made.holds_z(z)
            made.holds_y(y)

        assert runs(partial(call, 0), range(100))[:1] == [0]
        runs(lambda hundred, call=call: call(hundred, 0), range(1, 100))


def _batches() -> list[tuple[Batch, int]]:
    """Batches with their planes: one token, several segments a slot, and the other type."""
    found = [(batch(1, 16), 1), (batch(45, 16), 2), (batch(45, 16, torch.float16), 1)]
    return [(filled(made), planes) for made, planes in found]


CASES: dict[Callable[[Kernels], None], tuple[str, ...]] = {
    gram: ("lf_gram",),
    apply: ("lf_apply",),
    tsqr: ("lf_tsqr_workspace", "lf_tsqr_factor", "lf_tsqr_apply"),
    jacobi: ("lf_jacobi",),
    lora_plan: ("lf_lora_plan",),
    lora_shrink: ("lf_lora_shrink",),
    lora_row_expand: ("lf_lora_row_expand", "lf_lora_row_expand_attributes"),
    lora_fused: ("lf_lora_fused",),
}


def launchers(kernels: Path = KERNELS) -> set[str]:
    """Names of the functions that the library exports."""
    exported = re.compile(r"^LF_API\s+\w+\s+(lf_\w+)\s*\(", re.MULTILINE)
    return {name for path in kernels.rglob("*.cu") for name in exported.findall(path.read_text("utf-8"))}


def main() -> int:
    kernels = Kernels(eigensolver="jacobi")
    for case, names in CASES.items():
        case(kernels)
        torch.cuda.synchronize()
        print(*names, "ran", flush=True)
    missing = launchers().difference(*CASES.values())
    for name in sorted(missing):
        print(f"{name} has no case in {Path(__file__).name}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
