"""The real kernels and solver against their FP64 emulations, and the engine on them against FP64 references."""

from __future__ import annotations

import pytest
import torch

from loraforge.errors import InputError
from loraforge.factor import gpu
from loraforge.factor.batch import Batch, Ordered
from loraforge.factor.engine import (
    MAX_ACTION_ERROR,
    MAX_SPECTRUM_ERROR,
    action_errors,
    spectrum_errors,
)
from loraforge.factor.gpu.check import group_errors
from loraforge.factor.gpu.engine import FAILED, GRAM, TSQR, Group, GroupFactors, Method, factorise_groups
from loraforge.factor.gpu.ops import TALL, WIDE, Eigensolver, Emulated, Kernels
from loraforge.factor.reference import reference_spectrum

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# (m, d, r): one tile and many, partial last tiles, one column, odd sizes, wide ranks
STACKS = [
    (1, 1, 1),
    (5, 37, 1),
    (3, 64, 16),
    (7, 1000, 16),
    (3, 333, 33),
    (4, 2560, 64),
    (2, 1024, 128),
    (2, 700, 160),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    found = gpu.kernels()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def emulated(kernels: Kernels) -> Emulated:
    return Emulated(kernels.device)


def stack(shape: tuple[int, int, int], layout: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    m, d, r = shape
    generator = torch.Generator("cuda").manual_seed(m + d + r)
    size = (m, d, r) if layout == TALL else (m, r, d)
    return torch.randn(size, generator=generator, device="cuda").to(dtype)


def close(got: torch.Tensor, wanted: torch.Tensor, limit: float) -> None:
    difference = (got.double() - wanted.double()).abs().amax()
    assert torch.isfinite(got).all()
    assert difference <= limit * wanted.double().abs().amax()


@pytest.mark.parametrize("layout", [TALL, WIDE])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", STACKS)
def test_gram_and_apply(
    kernels: Kernels, emulated: Emulated, shape: tuple[int, int, int], dtype: torch.dtype, layout: int
) -> None:
    m, d, r = shape
    x = stack(shape, layout, dtype)
    got, wanted = (torch.full((m, r, r), torch.nan, dtype=torch.float64, device="cuda") for _ in range(2))
    kernels.gram(x, layout, got)
    emulated.gram(x, layout, wanted)
    close(got, wanted, 1e-13)
    assert torch.equal(got, got.mT)
    for k in sorted({1, (r + 1) // 2, r}):
        t = torch.randn(m, r, k, dtype=torch.float64, device="cuda")
        size = (m, d, k) if layout == TALL else (m, k, d)
        out, expected = (torch.full(size, torch.nan, device="cuda") for _ in range(2))
        kernels.apply(x, layout, t, out)
        emulated.apply(x, layout, t, expected)
        close(out, expected, 1e-6)


@pytest.mark.parametrize("layout", [TALL, WIDE])
@pytest.mark.parametrize("shape", STACKS)
def test_tsqr(kernels: Kernels, shape: tuple[int, int, int], layout: int) -> None:
    m, d, r = shape
    x = stack(shape, layout)
    upper = torch.full((m, r, r), torch.nan, device="cuda")
    held = kernels.tsqr_factor(x, layout, upper)
    assert torch.equal(upper, upper.triu())
    back = torch.empty_like(x)
    kernels.tsqr_apply(held, upper, layout, back)
    close(back, x, 2e-6)
    for k in sorted({1, (r + 1) // 2, r}):
        unit = torch.eye(r, device="cuda")[:, :k].expand(m, r, k).contiguous()
        q = torch.empty((m, d, k) if layout == TALL else (m, k, d), device="cuda")
        kernels.tsqr_apply(held, unit, layout, q)
        tall = (q if layout == TALL else q.mT).double()
        close(tall.mT @ tall, torch.eye(k, device="cuda").expand(m, k, k), 1e-5)


@pytest.mark.parametrize("eigensolver", ["fastest", "jacobi", "library"])
@pytest.mark.parametrize("n", [1, 2, 7, 16, 33, 64, 128, 160])
def test_eigensolvers(n: int, eigensolver: Eigensolver) -> None:
    backend = Kernels(eigensolver=eigensolver)
    x = torch.randn(50, 2 * n, n, dtype=torch.float64, device="cuda")
    g = x.mT @ x
    w, rows = backend.eigh(g.clone())
    assert (w[:, :-1] >= w[:, 1:]).all()
    close(rows.mT @ (w[:, :, None] * rows), g, 1e-12)
    close(rows @ rows.mT, torch.eye(n, device="cuda").double().expand_as(g), 1e-12)
    close(w, torch.linalg.eigvalsh(g.cpu()).flip(-1).cuda(), 1e-12)
    zero = torch.zeros(3, n, n, dtype=torch.float64, device="cuda")
    assert (backend.eigh(zero)[0] == 0).all()


SHAPES = [
    (40, 256, 640, 16),
    (20, 640, 256, 64),
    (6, 300, 300, 33),
    (3, 512, 1100, 128),
    (2, 400, 500, 200),
    (9, 17, 20, 1),
]


def group(shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float32) -> Group:
    m, d_in, d_out, r = shape
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    decay = torch.exp(-3 * torch.arange(r, device="cuda") / r)
    a = (torch.randn(m, r, d_in, generator=generator, device="cuda") * decay[:, None]).to(dtype)
    b = (torch.randn(m, d_out, r, generator=generator, device="cuda") * decay).to(dtype)
    return Group(a, b, torch.linspace(-2, 2, m, dtype=torch.float64, device="cuda") + 0.3)


def assert_accepted(given: Group, result: GroupFactors, kernels: Kernels) -> None:
    """On the device as the engine's users do, and on the CPU against QR and SVD."""
    action, spectrum = group_errors(given, result, kernels)
    assert action.max() < MAX_ACTION_ERROR
    assert spectrum.max() < MAX_SPECTRUM_ERROR
    (part,) = result.parts
    batch = Batch.of(given.a.cpu(), given.b.cpu(), given.scale.cpu())
    ordered = Ordered(result.s.cpu(), part.a.cpu(), part.b.cpu())
    assert action_errors(batch, ordered).max() < MAX_ACTION_ERROR
    assert spectrum_errors(reference_spectrum(batch), ordered.s).max() < MAX_SPECTRUM_ERROR


@pytest.mark.parametrize("method", ["gram", "tsqr", "auto"])
def test_a_fleet(kernels: Kernels, method: Method) -> None:
    groups = [group(shape) for shape in SHAPES]
    results = factorise_groups(groups, kernels, method=method)
    for given, result in zip(groups, results, strict=True):
        assert set(result.path.tolist()) == {TSQR if method == "tsqr" else GRAM}
        assert_accepted(given, result, kernels)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_half_precision(kernels: Kernels, dtype: torch.dtype) -> None:
    given = group(SHAPES[0], dtype)
    assert_accepted(given, factorise_groups([given], kernels)[0], kernels)


@pytest.mark.parametrize("method", ["gram", "tsqr"])
def test_repeatable_bit_for_bit_on_any_number_of_streams(kernels: Kernels, method: Method) -> None:
    groups = [group(shape) for shape in SHAPES]
    first = factorise_groups(groups, kernels, method=method, unit=16)
    for streams in (1, 2):
        again = factorise_groups(groups, kernels, method=method, unit=16, streams=streams)
        for one, other in zip(first, again, strict=True):
            assert torch.equal(one.s, other.s)
            assert torch.equal(one.parts[0].a, other.parts[0].a)
            assert torch.equal(one.parts[0].b, other.parts[0].b)


@pytest.mark.parametrize("method", ["auto", "tsqr"])
def test_odd_matrices_among_others(kernels: Kernels, method: Method) -> None:
    given = group(SHAPES[1])  # X is B here
    given.b[3] = 0
    given.a[5] = 0
    given.b[7, :, 4:] = given.b[7, :, :1]
    given.b[9] *= 1e-30
    given.b[11] *= 1e30
    (result,) = factorise_groups([given], kernels, method=method)
    assert FAILED not in result.path.tolist()
    if method == "auto":
        assert [j for j, path in enumerate(result.path.tolist()) if path == TSQR] == [3, 7]
    assert_accepted(given, result, kernels)


def test_deferred(kernels: Kernels) -> None:
    groups = [group(shape) for shape in SHAPES]
    ks = [torch.randint(1, g.key[2] + 1, (len(g),)).sort().values for g in groups]
    full = factorise_groups(groups, kernels)
    for whole, part, keep in zip(full, factorise_groups(groups, kernels, ks=ks), ks, strict=True):
        for j, k in enumerate(keep.tolist()):
            for got, wanted in zip(part.factors(j, k), whole.factors(j, k), strict=True):
                close(got, wanted, 1e-5)


def test_a_bad_value_is_named(kernels: Kernels) -> None:
    given = group(SHAPES[0])
    given.a[4, 2, 3] = torch.nan
    named = Group(given.a, given.b, given.scale, [f"module {j}" for j in range(len(given))])
    with pytest.raises(InputError, match="module 4: holds NaN"):
        factorise_groups([named], kernels)
