"""Every kernel once or a few times at small, odd sizes, for compute-sanitizer: see run_sanitizer.sh.

Inputs come by copies from the host and outputs are not initialised, so that all a kernel may read is known to the
tools and all it should write is seen to be written. Results are compared loosely: the tests are where accuracy is held.
A new launcher needs an entry in ``CASES``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from loraforge.factor.gpu.ops import TALL, WIDE, Emulated, Kernels
from loraforge.jit import KERNELS

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


CASES: dict[Callable[[Kernels], None], tuple[str, ...]] = {
    gram: ("lf_gram",),
    apply: ("lf_apply",),
    tsqr: ("lf_tsqr_workspace", "lf_tsqr_factor", "lf_tsqr_apply"),
    jacobi: ("lf_jacobi",),
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
