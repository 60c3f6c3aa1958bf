"""Gram, thin-product and Jacobi kernels against FP64 references, and how near they come to their floors.

Run as a test (``pytest -m gpu tests/gpu/test_gram_kernels.py``) or as a script, which prints a table of times.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable
from functools import cache

import pytest
import torch

from loraforge import jit
from loraforge.factor.gpu.solver import SyevBatched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
RANKS = (1, 3, 16, 31, 32, 48, 64, 100, 128, 200)
BANDWIDTH = 4.2e12  # bytes/s, a copy on one H200, counting bytes read and written
FP64_RATE = 67e12  # flop/s, tensor cores, datasheet


@cache
def library() -> ctypes.CDLL:
    """The kernels, built if need be, with the three prototypes declared."""
    lib = jit.load()
    pointer, wide, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    lib.lf_gram.argtypes = [pointer, number, number, pointer, wide, number, number, pointer]
    lib.lf_apply.argtypes = [pointer, number, number, pointer, pointer, wide, number, number, number, pointer]
    lib.lf_jacobi.argtypes = [pointer, pointer, pointer, pointer, wide, number, pointer]
    return lib


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """An output in which an unwritten element shows."""
    return torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def run(function: Callable[..., int], *arguments: object) -> None:
    """Calls a launcher on the current stream; tensors go as pointers."""
    raw = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
    code = function(*raw, torch.cuda.current_stream().cuda_stream)
    assert code == 0, f"launcher returned {code}"


def stack(m: int, d: int, r: int, dtype: torch.dtype, layout: int, seed: int = 0) -> torch.Tensor:
    """A random factor stack: [m, d, r] for layout 0, [m, r, d] for layout 1."""
    generator = torch.Generator("cuda").manual_seed(seed + 7 * r + d)
    return torch.randn((m, d, r) if layout == 0 else (m, r, d), device="cuda", generator=generator).to(dtype)


def tall(x: torch.Tensor, layout: int) -> torch.Tensor:
    """The FP64 [m, d, r] view."""
    return (x if layout == 0 else x.mT).double()


def gram(x: torch.Tensor, layout: int) -> torch.Tensor:
    """``lf_gram`` of a stack."""
    m, d, r = x.shape if layout == 0 else (x.shape[0], x.shape[2], x.shape[1])
    g = poisoned(m, r, r, dtype=torch.float64)
    run(library().lf_gram, x, DTYPES[x.dtype], layout, g, m, d, r)
    return g


def apply(x: torch.Tensor, t: torch.Tensor, layout: int) -> torch.Tensor:
    """``lf_apply`` of a stack."""
    m, d, r = x.shape if layout == 0 else (x.shape[0], x.shape[2], x.shape[1])
    k = t.shape[2]
    y = poisoned(*((m, d, k) if layout == 0 else (m, k, d)), dtype=torch.float32)
    run(library().lf_apply, x, DTYPES[x.dtype], layout, t, y, m, d, r, k)
    return y


def jacobi(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``lf_jacobi`` of a copy: values, vectors, sweeps."""
    m, n, _ = g.shape
    w, v = poisoned(m, n, dtype=torch.float64), poisoned(m, n, n, dtype=torch.float64)
    sweeps = torch.full((m,), -99, dtype=torch.int32, device="cuda")
    run(library().lf_jacobi, g.clone(), w, v, sweeps, m, n)
    return w, v, sweeps


@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("r", RANKS)
def test_gram_matches_fp64(r: int, dtype: torch.dtype, layout: int) -> None:
    for m, d in ((1, r), (1, 3001), (5, 1024), (3, 2560), (1000, r + 37)):
        x = stack(m, d, r, dtype, layout)
        g, reference = gram(x, layout), tall(x, layout).mT @ tall(x, layout)
        error = (g - reference).flatten(1).norm(dim=1) / reference.flatten(1).norm(dim=1)
        assert float(error.max()) < 1e-14, (m, d)
        assert torch.equal(g, g.mT), "not exactly symmetric"
        assert torch.equal(g, gram(x, layout)), "not repeatable"


@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("r", RANKS)
def test_apply_matches_fp64(r: int, dtype: torch.dtype, layout: int) -> None:
    for k in sorted({1, min(5, r), max(1, r // 3), r}):
        for m, d in ((1, r), (1, 3001), (5, 1024), (1000, r + 37)):
            x = stack(m, d, r, dtype, layout)
            t = torch.randn(m, r, k, device="cuda", dtype=torch.float64)
            y, reference = apply(x, t, layout), tall(x, layout) @ t
            reference = reference if layout == 0 else reference.mT
            assert torch.isfinite(y).all(), (m, d, k)
            # one rounding to FP32
            assert float((y - reference).abs().max() / reference.abs().max()) < 1.2e-7, (m, d, k)
            assert torch.equal(y, apply(x, t, layout)), "not repeatable"


@pytest.mark.parametrize("layout", [0, 1])
def test_unaligned_pointers(layout: int) -> None:
    d, r = 160, 64
    x = torch.randn(2 * d * r + 1, device="cuda")[1:].view(2, *((d, r) if layout == 0 else (r, d)))
    t = torch.randn(2, r, r, device="cuda", dtype=torch.float64)
    reference = tall(x, layout)
    torch.testing.assert_close(gram(x, layout), reference.mT @ reference, rtol=1e-12, atol=1e-10)
    product = reference @ t
    torch.testing.assert_close(apply(x, t, layout), (product if layout == 0 else product.mT).float())


def spectrum(kind: str, m: int, n: int) -> torch.Tensor:
    """Eigenvalues [m, n] of a named kind."""
    if kind == "random":
        return torch.rand(m, n, dtype=torch.float64, device="cuda")
    if kind == "degenerate":
        return torch.ones(m, n, dtype=torch.float64, device="cuda")
    if kind == "half":  # rank n / 2, and each value twice
        return (torch.arange(n, device="cuda") // 2 < n // 4).double().expand(m, n)
    if kind == "zero":
        return torch.zeros(m, n, dtype=torch.float64, device="cuda")
    if kind == "indefinite":
        return 2 * torch.rand(m, n, dtype=torch.float64, device="cuda") - 1
    if kind == "clustered":  # ten digits in common
        level = 10.0 ** -(torch.arange(n, device="cuda") * 4 // n).double()
        return level * (1 + 1e-10 * torch.randn(m, n, dtype=torch.float64, device="cuda"))
    return torch.logspace(0, -24, n, dtype=torch.float64, device="cuda").expand(m, n)


@pytest.mark.parametrize(
    "kind", ["random", "degenerate", "half", "zero", "graded", "indefinite", "clustered"]
)
@pytest.mark.parametrize(
    "n", [1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 48, 64, 65, 96, 97, 100, 127, 128, 129, 160]
)
def test_jacobi_matches_eigh(n: int, kind: str) -> None:
    m = 9
    basis = torch.linalg.qr(torch.randn(m, n, n, dtype=torch.float64))[0].cuda()
    g = (basis * spectrum(kind, m, n)[:, None, :]) @ basis.mT
    g = (g + g.mT) / 2
    w, v, sweeps = jacobi(g)
    reference = torch.linalg.eigvalsh(g.cpu()).flip(-1).cuda()
    scale = max(float(g[0].norm()), 1e-300)
    assert int(sweeps.min()) >= 0, sweeps.tolist()
    assert float((w - reference).abs().max()) < 1e-14 * scale
    assert bool((w[:, :-1] >= w[:, 1:]).all())
    assert float((v.mT @ v - torch.eye(n, dtype=torch.float64, device="cuda")).abs().max()) < 1e-13
    assert float((g @ v - v * w[:, None, :]).abs().max()) < 2e-14 * scale
    again = jacobi(g)
    assert torch.equal(w, again[0])
    assert torch.equal(v, again[1])
    assert torch.equal(jacobi(g[4:5].clone())[1], v[4:5]), "depends on the batch"


@pytest.mark.parametrize("scale", [2.0**-960, 2.0**-100, 2.0**100, 2.0**1000])
@pytest.mark.parametrize("n", [5, 32, 64, 90, 128])
def test_jacobi_of_a_scaled_matrix_is_the_scaled_result(n: int, scale: float) -> None:
    x = torch.randn(3, n, 2 * n, dtype=torch.float64, device="cuda")
    g = x @ x.mT
    w, v, sweeps = jacobi(g)
    scaled = jacobi(g * scale)
    assert torch.equal(scaled[0], w * scale)
    assert torch.equal(scaled[1], v)
    assert torch.equal(scaled[2], sweeps)


@pytest.mark.parametrize("n", [16, 30, 64, 80, 128])
def test_jacobi_reads_the_upper_triangle(n: int) -> None:
    x = torch.randn(3, n, n, dtype=torch.float64, device="cuda")
    g = x @ x.mT
    g = (g + g.mT) / 2
    for whole, half in zip(jacobi(g), jacobi(g.triu()), strict=True):
        assert torch.equal(whole, half)


@pytest.mark.parametrize("n", [16, 32, 64, 96, 128])
def test_jacobi_is_as_accurate_as_the_library(n: int) -> None:
    solver = SyevBatched.find(torch.device("cuda"))
    if solver is None:
        pytest.skip("no cusolverDnXsyevBatched")
    x = torch.randn(64, n, 2 * n, dtype=torch.float64, device="cuda")
    x *= torch.logspace(0, -3, n, dtype=torch.float64, device="cuda")[:, None]
    g = x @ x.mT
    g = (g + g.mT) / 2
    theirs, rows = solver(g.clone())
    reference = torch.linalg.eigvalsh(g.cpu()).flip(-1).cuda()
    scale = g.flatten(1).norm(dim=1)[:, None]

    def errors(w: torch.Tensor, v: torch.Tensor) -> tuple[float, float, float]:
        eye = torch.eye(n, dtype=torch.float64, device="cuda")
        residual = (g @ v - v * w[:, None, :]).flatten(1).norm(dim=1, keepdim=True) / scale
        values = (w - reference).abs() / scale
        return float(values.max()), float(residual.max()), float((v.mT @ v - eye).abs().max())

    w, v, _ = jacobi(g)
    for ours, library in zip(errors(w, v), errors(theirs.flip(-1), rows.flip(-2).mT), strict=True):
        assert ours < max(2 * library, 1e-14)


@pytest.mark.parametrize("n", [16, 32, 40, 100, 130])
def test_jacobi_marks_what_is_not_finite(n: int) -> None:
    g = torch.eye(n, dtype=torch.float64, device="cuda").repeat(3, 1, 1)
    g[1, 0, n - 1] = g[1, n - 1, 0] = float("nan")
    w, v, sweeps = jacobi(g)
    assert sweeps.tolist() == [0, -1, 0]
    assert bool(w[1].isnan().all())
    assert bool(v[1].isnan().all())
    assert float((w[0] - 1).abs().max()) < 1e-15


def milliseconds(body: Callable[[], object], repeats: int = 5) -> float:
    """Median of event times after two warm-ups."""
    times = []
    for i in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        body()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def report(name: str, ms: float, moved: float, flops: float) -> None:
    """One line: time, rates, and the ratio to the larger of the two floors."""
    floor = 1e3 * max(moved / BANDWIDTH, flops / FP64_RATE)
    print(
        f"{name:44s} {ms:8.3f} ms {moved / ms / 1e6:7.0f} GB/s {flops / ms / 1e9:6.1f} TFLOP/s  x{ms / floor:.2f} floor"
    )


def time_products() -> None:
    """Gram of one stack and its application, for the shapes that dominate a fleet."""
    shapes = [(6000, 2560, 64), (6000, 4096, 64), (6000, 9728, 64), (1260, 2560, 16), (252, 9728, 128)]
    for m, d, r in shapes:
        for layout in (0, 1):
            x = stack(m, d, r, torch.float32, layout)
            read = 4.0 * m * d * r
            g = torch.empty(m, r, r, device="cuda", dtype=torch.float64)
            ms = milliseconds(
                lambda x=x, g=g, a=(layout, m, d, r): run(library().lf_gram, x, 0, a[0], g, *a[1:])
            )
            report(
                f"gram  m {m} d {d} r {r} layout {layout}",
                ms,
                read + 8.0 * m * r * r,
                1.0 * m * d * r * (r + 1),
            )
            for k in sorted({5, r}):
                t = torch.randn(m, r, k, device="cuda", dtype=torch.float64)
                y = torch.empty(m * d * k, device="cuda")
                ms = milliseconds(
                    lambda x=x, t=t, y=y, a=(layout, m, d, r, k): run(
                        library().lf_apply, x, 0, a[0], t, y, *a[1:]
                    )
                )
                moved = read + 8.0 * m * r * k + 4.0 * m * d * k
                report(f"apply m {m} d {d} r {r} k {k} layout {layout}", ms, moved, 2.0 * m * d * r * k)
                del t, y
            del x, g


def time_jacobi() -> None:
    """Microseconds a matrix, for a random and a graded spectrum; targets are 1.5 times the library's."""
    m = 2048
    for n, library_us in ((16, 0.3), (32, 1.0), (64, 3.5), (128, 12.3)):
        for grade in (0, 8):
            basis = torch.linalg.qr(torch.randn(32, n, n, device="cuda"))[0].double().repeat(m // 32, 1, 1)
            values = (
                torch.rand(m, n, device="cuda").double()
                * torch.logspace(0, -grade, n, device="cuda").double()
            )
            g = (basis * values[:, None, :]) @ basis.mT
            w, v = torch.empty(m, n, device="cuda").double(), torch.empty_like(g)
            sweeps = torch.zeros(m, dtype=torch.int32, device="cuda")
            ms = milliseconds(lambda g=g, w=w, v=v, s=sweeps, n=n: run(library().lf_jacobi, g, w, v, s, m, n))
            us, mean = 1e3 * ms / m, float(sweeps.float().mean())
            ratio = us / library_us
            print(
                f"jacobi n {n} spectrum 1e-{grade}: {us:7.3f} us a matrix, {mean:.1f} sweeps, x{ratio:.2f} library"
            )


if __name__ == "__main__":
    time_jacobi()
    time_products()
