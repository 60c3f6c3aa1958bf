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
from pathlib import Path

import torch

from loraforge.factor.gpu.ops import TALL, WIDE, Emulated, Kernels
from loraforge.jit import KERNELS, load
from loraforge.ops import cuda, reference
from loraforge.ops.plan import Plan, empty_plan
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


def serving() -> Iterator[tuple[list[tuple[int, int]], list[torch.Tensor], SlotTable, Plan, SlotTable]]:
    """Mixed ranks of one and of three slices at a few tokens and at some: channels, (x, a, b, y) and the table on the
    host, and a plan and the table on the device, all by copies."""
    for tokens, ranks in ((3, [[8], [128]]), (37, [[8, 1, 64], [0, 0, 0], [17, 128, 33], [4, 16, 12]])):
        generator = torch.Generator().manual_seed(tokens)

        def normal(*size: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(size, generator=generator).to(torch.bfloat16)

        d_in, channels = 264, [(0, 264), (264, 72), (336, 40)][: len(ranks[0])]
        width = sum(count for _, count in channels)
        table, there = SlotTable(len(ranks), len(channels)), SlotTable(len(ranks), len(channels))
        at = 0
        for slot, row in enumerate(ranks):
            of_slot = []
            for piece, (rank, (_, count)) in enumerate(zip(row, channels, strict=True)):
                of_slot.append(
                    Slot((slot * len(channels) + piece) * 128 * d_in, at, rank, bucket(rank), 0.25)
                )
                at += count * bucket(rank)
            table.set(slot, of_slot)
        there.tensor = table.tensor.cuda()
        plan = empty_plan(tokens, len(ranks), 16)
        plan.token_slots.copy_(torch.randint(-1, len(ranks), (tokens,), generator=generator))
        moved = Plan(*(part.cuda() for part in (plan.token_slots, plan.order, plan.segments, plan.count)), 16)
        operands = [normal(tokens, d_in), normal(len(ranks) * len(channels) * 128, d_in), normal(at)]
        yield channels, [*operands, normal(tokens, width)], table, moved, there


def lora(kernels: Kernels) -> None:
    """The plan, and every variant of the two products, apart and together."""
    del kernels
    for channels, (x, a, b, y), table, plan, there in serving():
        cuda.fill(plan, table.slots)
        routing = plan.token_slots.cpu()
        z = reference.shrink(x, a, table, routing, 128)
        wanted = reference.expand(z, b, table, routing, y, channels)
        on_x, on_a, on_b = x.cuda(), a.cuda(), b.cuda()
        for shrink, expand in ((1, 4), (5, 5), (7, 6), (11, 7), (12, 8), (14, 1), (16, 3), (11, 9), (12, 16)):
            for planes in (1, 3):
                _, sums = empty(planes, len(x), len(channels), 128)
                apart, together = y.cuda(), y.cuda()
                cuda.shrink(on_x, on_a, there.tensor, plan, sums, shrink)
                cuda.expand(sums, on_b, there.tensor, plan, apart, channels, 16, 1, expand)
                cuda.lora(
                    *(on_x, on_a, on_b, there.tensor, plan, sums, together, channels),
                    None,
                    shrink + 100 * expand,
                )
                same(wanted, apart, 1e-2)
                same(wanted, together, 1e-2)
    attributes = load("lora", kind="nvcc").lf_lora_row_expand_attributes
    assert attributes(8, 1, 3, *(ctypes.byref(ctypes.c_int()) for _ in range(4))) == 0


CASES: dict[Callable[[Kernels], None], tuple[str, ...]] = {
    gram: ("lf_gram",),
    apply: ("lf_apply",),
    tsqr: ("lf_tsqr_workspace", "lf_tsqr_factor", "lf_tsqr_apply"),
    jacobi: ("lf_jacobi",),
    lora: (
        "lf_lora_plan",
        "lf_lora_shrink",
        "lf_lora_row_expand",
        "lf_lora_fused",
        "lf_lora_row_expand_attributes",
    ),
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
