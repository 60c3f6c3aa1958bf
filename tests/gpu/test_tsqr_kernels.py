"""FlashTSQR on a real GPU against FP64: R, Q, Q R, extremes, layouts, element types, bounds, repeatability, time.

Run as a test (``pytest -m gpu tests/gpu/test_tsqr_kernels.py``) or as a script, which also prints timings.
"""

from __future__ import annotations

import ctypes
import functools
import statistics
import sys
from collections.abc import Callable

import pytest
import torch

from loraforge import jit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
GUARD = 256  # elements kept on either side of each output
CANARY = 12345.0


@functools.cache
def library() -> ctypes.CDLL:
    lib = jit.load()
    p, i, n = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    lib.lf_tsqr_workspace.argtypes = [n, i, i]
    lib.lf_tsqr_workspace.restype = n
    lib.lf_tsqr_factor.argtypes = [p, i, i, p, p, n, i, i, p]
    lib.lf_tsqr_apply.argtypes = [p, p, p, i, n, i, i, i, p]
    return lib


class Guarded:
    """An output full of NaN between two runs of canaries."""

    def __init__(self, *shape: int) -> None:
        size = torch.Size(shape).numel()
        self._whole = torch.full((size + 2 * GUARD,), torch.nan, device="cuda")
        self._whole[:GUARD] = CANARY
        self._whole[GUARD + size :] = CANARY
        self.values = self._whole[GUARD : GUARD + size].view(shape)

    def check(self) -> torch.Tensor:
        assert bool((self._whole[:GUARD] == CANARY).all())
        assert bool((self._whole[-GUARD:] == CANARY).all())
        return self.values


class Factored:
    """QR of a stack of tall matrices ``[m, d, r]``, given to the kernels in either layout."""

    def __init__(self, tall: torch.Tensor, layout: int) -> None:
        self.m, self.d, self.r = tall.shape
        stored = (tall if layout == 0 else tall.mT).contiguous()
        self.workspace = Guarded(library().lf_tsqr_workspace(self.m, self.d, self.r) // 4)
        r = Guarded(self.m, self.r, self.r)
        status = library().lf_tsqr_factor(
            stored.data_ptr(),
            DTYPES[tall.dtype],
            layout,
            r.values.data_ptr(),
            self.workspace.values.data_ptr(),
            self.m,
            self.d,
            self.r,
            torch.cuda.current_stream().cuda_stream,
        )
        assert status == 0
        self.triangle = r.check()

    def apply(self, c: torch.Tensor, layout: int) -> torch.Tensor:
        """Tall ``Q c`` whatever the layout it was written in."""
        k = c.shape[2]
        c = c.contiguous()
        y = Guarded(self.m, self.d, k) if layout == 0 else Guarded(self.m, k, self.d)
        status = library().lf_tsqr_apply(
            self.workspace.values.data_ptr(),
            c.data_ptr(),
            y.values.data_ptr(),
            layout,
            self.m,
            self.d,
            self.r,
            k,
            torch.cuda.current_stream().cuda_stream,
        )
        assert status == 0
        self.workspace.check()
        return y.check() if layout == 0 else y.check().mT


def random_stack(m: int, d: int, r: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(1000 * d + r)
    return torch.randn(m, d, r, device="cuda", generator=generator).to(dtype)


def check(tall: torch.Tensor, layout: int) -> None:
    """Everything that must hold of a factorisation, for any input, relative to the norm of each matrix."""
    x = tall.double()
    m, _, r = x.shape
    norm = torch.linalg.matrix_norm(x)
    norm = torch.where(norm == 0, torch.ones_like(norm), norm)
    tolerance = 3e-6 * max(1.0, r / 32) ** 0.5
    factored = Factored(tall, layout)
    triangle = factored.triangle.double()
    assert bool(torch.isfinite(triangle).all())
    assert bool((triangle.tril(-1) == 0).all())
    x, triangle = x / norm[:, None, None], triangle / norm[:, None, None]
    gram_error = torch.linalg.matrix_norm(triangle.mT @ triangle - x.mT @ x)
    assert float(gram_error.max()) < 2 * tolerance
    for out_layout in (0, 1):
        identity = torch.eye(r, device="cuda").expand(m, r, r)
        q = factored.apply(identity, out_layout).double()
        assert float((q.mT @ q - torch.eye(r, device="cuda")).abs().max()) < tolerance
        assert float(torch.linalg.matrix_norm(q @ triangle - x).max()) < tolerance
        direct = factored.apply(factored.triangle, out_layout).double() / norm[:, None, None]
        assert float(torch.linalg.matrix_norm(direct - x).max()) < tolerance
        for k in sorted({1, r // 3, min(r, 5)} - {0, r}):
            c = random_stack(m, r, k)
            wanted = q @ c.double()
            got = factored.apply(c, out_layout).double()
            scale = torch.linalg.matrix_norm(c.double()).max()
            assert float(torch.linalg.matrix_norm(got - wanted).max() / scale) < 2 * tolerance


SHAPES = [
    *[(3, 700, r) for r in (1, 3, 16, 31, 32, 64, 100, 127, 128, 129, 200)],
    *[(1, r, r) for r in (1, 4, 64, 128, 200)],
    *[(2, d, 24) for d in (24, 255, 256, 257, 511, 513, 1280, 1283)],
    (1, 2560, 64),
    (1000, 300, 12),
    (1000, 1024, 16),
    (7, 2560, 128),
    (2, 2560, 256),
]


@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize(("m", "d", "r"), SHAPES)
def test_shapes(m: int, d: int, r: int, layout: int) -> None:
    check(random_stack(m, d, r), layout)


@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("m", "d", "r"), [(3, 1000, 32), (2, 515, 31), (2, 517, 64), (2, 900, 200)])
def test_element_types(m: int, d: int, r: int, dtype: torch.dtype, layout: int) -> None:
    check(random_stack(m, d, r, dtype), layout)


@pytest.mark.parametrize("r", [24, 100, 140])
@pytest.mark.parametrize("layout", [0, 1])
def test_extremes(r: int, layout: int) -> None:
    x = random_stack(2, 600, r)
    columns = torch.arange(r, device="cuda")
    rows = torch.arange(600, device="cuda")[:, None]
    check(torch.zeros_like(x), layout)
    check(x[:, :, :5] @ random_stack(2, 5, r), layout)
    check(torch.where(columns % 3 > 0, x, 0), layout)
    check(torch.where(rows >= 256, x, 0), layout)
    check(torch.where(rows < 7, x, 0), layout)
    check(x * 1e-30, layout)
    check(x * 1e30, layout)
    check(x * torch.logspace(0, -35, r, device="cuda"), layout)
    check(torch.where(columns % 2 > 0, x * 1e30, x * 1e-30), layout)


@pytest.mark.parametrize("r", [16, 64, 128, 200])
def test_agrees_with_a_library_qr(r: int) -> None:
    x = random_stack(2, 900, r)
    wanted = torch.linalg.qr(x.double().cpu(), mode="r").R
    got = Factored(x, 0).triangle.double().cpu()
    assert float((got.abs() - wanted.abs()).abs().max() / wanted.abs().max()) < 1e-5


@pytest.mark.parametrize("r", [24, 128, 140])
def test_one_matrix_does_not_touch_another(r: int) -> None:
    x = random_stack(5, 600, r)
    alone = [Factored(x[i : i + 1], 0) for i in range(5)]
    c = random_stack(5, r, r)
    x[2, 17, 3] = torch.nan
    together = Factored(x, 0)
    y = together.apply(c, 0)
    assert bool(together.triangle[2].isnan().any())
    for i in (0, 1, 3, 4):
        assert torch.equal(together.triangle[i], alone[i].triangle[0])
        assert torch.equal(y[i], alone[i].apply(c[i : i + 1], 0)[0])


@pytest.mark.parametrize("r", [16, 100, 128, 200])
def test_bitwise_repeatable(r: int) -> None:
    x = random_stack(40, 1100, r)
    c = random_stack(40, r, r)
    first, second = Factored(x, 0), Factored(x, 0)
    assert torch.equal(first.triangle, second.triangle)
    y = first.apply(c, 0)
    assert torch.equal(y, second.apply(c, 0))
    assert torch.equal(y, first.apply(c, 0))
    assert torch.equal(y, first.apply(c, 1))


def test_unsupported_arguments_are_refused() -> None:
    lib = library()
    assert lib.lf_tsqr_workspace(1, 10, 11) == -1
    assert lib.lf_tsqr_workspace(1, 10, 0) == -1
    assert lib.lf_tsqr_factor(None, 3, 0, None, None, 1, 10, 2, None) == -1
    assert lib.lf_tsqr_factor(None, 0, 2, None, None, 1, 10, 2, None) == -1
    assert lib.lf_tsqr_apply(None, None, None, 0, 1, 10, 2, 3, None) == -1
    assert lib.lf_tsqr_factor(None, 0, 0, None, None, 0, 10, 2, None) == 0


def median_ms(run: Callable[[], None], passes: int = 5) -> float:
    """Median of event-timed passes after one warm-up."""
    times = []
    for _ in range(passes + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:])


def time_shape(m: int, d: int, r: int, layout: int) -> None:
    """Print milliseconds of the factorisation and of applying Q to all directions; only kernels are timed."""
    lib, stream = library(), torch.cuda.current_stream().cuda_stream
    x = torch.randn((m, d, r) if layout == 0 else (m, r, d), device="cuda")
    rfac = torch.empty(m, r, r, device="cuda")
    c = torch.randn(m, r, r, device="cuda")
    y = torch.empty_like(x)
    work = torch.empty(lib.lf_tsqr_workspace(m, d, r), dtype=torch.uint8, device="cuda")

    def factor() -> None:
        status = lib.lf_tsqr_factor(
            x.data_ptr(), 0, layout, rfac.data_ptr(), work.data_ptr(), m, d, r, stream
        )
        assert status == 0

    def apply() -> None:
        assert lib.lf_tsqr_apply(work.data_ptr(), c.data_ptr(), y.data_ptr(), layout, m, d, r, r, stream) == 0

    factor_ms, apply_ms = median_ms(factor), median_ms(apply)
    flops = 2.0 * m * d * r * r
    print(
        f"m={m} d={d} r={r} layout={layout}: factor {factor_ms:.2f} ms ({flops / factor_ms / 1e9:.1f} TFLOP/s), "
        f"apply {apply_ms:.2f} ms ({2 * flops / apply_ms / 1e9:.1f} TFLOP/s), "
        f"bytes of x at {x.nbytes / factor_ms / 1e9:.2f} TB/s, workspace {work.nbytes / 2**30:.2f} GiB"
    )


def time_all() -> None:
    for m, d, r in [(6000, 2560, 64), (2000, 1024, 64), (252, 2560, 128), (2000, 2560, 16), (2000, 2560, 32)]:
        for layout in (0, 1):
            time_shape(m, d, r, layout)


if __name__ == "__main__":
    failed = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--noconftest", __file__])
    if not failed:
        time_all()
    sys.exit(failed)
