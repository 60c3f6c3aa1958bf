"""Every path and baseline against a dense FP64 SVD, over shapes, types and conditioning."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraforge.factor import recompression
from loraforge.factor.batch import Batch, Ordered
from loraforge.factor.engine import (
    MAX_ACTION_ERROR,
    MAX_SPECTRUM_ERROR,
    action_errors,
    construct,
    spectrum_errors,
)
from loraforge.factor.evd import eigh_descending
from loraforge.factor.gram import gram_factors
from loraforge.factor.reference import dense_svd, reference_factors, reference_spectrum
from loraforge.factor.stages import Stages
from loraforge.factor.tsqr import tsqr, tsqr_factors

PATHS = {
    "gram": lambda batch: gram_factors(batch, Stages())[0],
    "tsqr": lambda batch: tsqr_factors(batch, Stages()),
    "tsqr_tree": lambda batch: tsqr_factors(batch, Stages(), tile_rows=7),
    "reference": lambda batch: reference_factors(batch, Stages()),
}
# FP32 QR leaves an error of a few 1e-7 of |s| |A| |B|, which exceeds |s B A| where the product cancels; FP64 paths
# leave rounding of the recomputation only, relative to the product itself
SPECTRUM_LIMIT = {"gram": 1e-11, "reference": 1e-13, "tsqr": 1e-6, "tsqr_tree": 1e-6}
FP32_QR = {"tsqr", "tsqr_tree", "fraq", "spectral_transform", "spectral_transform_batched"}


def ill_conditioned(rows: int, rank: int, condition: float, generator: torch.Generator) -> torch.Tensor:
    """FP64 [rows, rank] with singular values falling evenly in the logarithm from 1 to 1 / condition."""
    q, _ = torch.linalg.qr(torch.randn(rows, rank, generator=generator, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(rank, rank, generator=generator, dtype=torch.float64))
    return (
        q * torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), rank, dtype=torch.float64)
    ) @ v


def check_against_dense(
    ordered: Ordered, a: torch.Tensor, b: torch.Tensor, scale: float, limit: float, *, fp32_qr: bool
) -> None:
    """One update: spectrum, balance, order and optimality of every prefix."""
    rank = a.shape[0]
    _, s, _ = dense_svd(a, b, scale)
    top = s[0].item()
    factors = abs(scale) * torch.linalg.matrix_norm(a.double(), 2) * torch.linalg.matrix_norm(b.double(), 2)
    unit = factors.item() if fp32_qr else top
    assert ordered.s.dtype == torch.float64
    assert ordered.a.dtype == ordered.b.dtype == torch.float32
    assert (ordered.s[0, :-1] >= ordered.s[0, 1:]).all()
    assert (ordered.s[0] - s[:rank]).abs().max().item() <= limit * unit
    update = scale * (b.to(torch.float64) @ a.to(torch.float64))
    left, right = ordered.b[0].to(torch.float64), ordered.a[0].to(torch.float64)
    for k in range(rank + 1):
        best = (s[k:] ** 2).sum().sqrt()
        got = torch.linalg.norm(update - left[:, :k] @ right[:k])
        assert got <= best + 3e-6 * max(unit, torch.linalg.norm(s)), (k, got, best)
    live = ordered.s[0] > 1e-4 * top
    assert torch.allclose(left.norm(dim=0)[live] ** 2, ordered.s[0][live], rtol=1e-4)
    assert torch.allclose(right.norm(dim=1)[live] ** 2, ordered.s[0][live], rtol=1e-4)


shapes = st.tuples(st.integers(1, 12), st.integers(0, 40), st.integers(0, 40)).map(
    lambda t: (t[0], t[0] + t[1], t[0] + t[2])
)


@pytest.mark.parametrize("path", list(PATHS))
@settings(max_examples=25, deadline=None)
@given(
    shape=shapes,
    dtype=st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    condition=st.sampled_from([1.0, 30.0, 1e3]),
    scale=st.sampled_from([2.0, -0.5, 0.125, 11.3]),
    seed=st.integers(0, 2**20),
)
def test_path_matches_dense_svd(
    path: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    condition: float,
    scale: float,
    seed: int,
) -> None:
    rank, d_in, d_out = shape
    generator = torch.Generator().manual_seed(seed)
    a = ill_conditioned(d_in, rank, condition, generator).mT.to(dtype)
    b = ill_conditioned(d_out, rank, condition, generator).to(dtype)
    batch = Batch.of(a[None], b[None], torch.tensor([scale]).double())
    scale = torch.tensor([scale]).double().item()
    if path == "gram" and not len(gram_factors(batch, Stages())[1]):
        return  # rounding to a short type made it rank-deficient: the fallback's case
    check_against_dense(PATHS[path](batch), a, b, scale, SPECTRUM_LIMIT[path], fp32_qr=path in FP32_QR)


@pytest.mark.parametrize("method", list(recompression.METHODS))
@settings(max_examples=20, deadline=None)
@given(shape=shapes, condition=st.sampled_from([1.0, 1e2]), seed=st.integers(0, 2**20))
def test_recompression_method_matches_dense_svd(
    method: str, shape: tuple[int, int, int], condition: float, seed: int
) -> None:
    rank, d_in, d_out = shape
    generator = torch.Generator().manual_seed(seed)
    a = ill_conditioned(d_in, rank, condition, generator).mT.float()
    b = ill_conditioned(d_out, rank, condition, generator).float()
    ordered = recompression.METHODS[method](a[None], b[None], Stages())
    check_against_dense(ordered, a, b, 1.0, 1e-6, fp32_qr=method in FP32_QR)


@pytest.mark.parametrize("path", list(PATHS))
@pytest.mark.parametrize("scale", [1e-30, 1e30])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_extreme_scales_and_sizes_are_exact(path: str, scale: float, size: float) -> None:
    """Powers of ten this large overflow or vanish in FP32 when squared; the relative result must not change."""
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(4, 20, generator=generator) * size
    b = torch.randn(24, 4, generator=generator) / size
    batch = Batch.of(a[None], b[None], torch.tensor([scale], dtype=torch.float64))
    ordered = PATHS[path](batch)
    assert action_errors(batch, ordered).item() < 2e-6
    assert spectrum_errors(reference_spectrum(batch), ordered.s).item() < SPECTRUM_LIMIT[path]
    _, s, _ = dense_svd(a, b, scale)
    assert ((ordered.s[0] - s[:4]) / s[0]).abs().max() < SPECTRUM_LIMIT[path]


def test_fp64_factors_beyond_fp32_are_normalised() -> None:
    generator = torch.Generator().manual_seed(4)
    a = torch.randn(3, 20, generator=generator).double() * 1e200
    b = torch.randn(24, 3, generator=generator).double() * 1e-200
    batch = Batch.of(a[None], b[None], torch.ones(1))
    ordered, index = gram_factors(batch, Stages())
    assert len(index) == 1
    assert action_errors(batch, ordered).item() < 1e-6


@pytest.mark.parametrize("path", ["tsqr", "tsqr_tree", "reference"])
@pytest.mark.parametrize("zero", ["a", "b", "scale"])
def test_zero_update_has_zero_factors_and_no_error(path: str, zero: str) -> None:
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(1, 4, 20, generator=generator) * (zero != "a")
    b = torch.randn(1, 24, 4, generator=generator) * (zero != "b")
    batch = Batch.of(a, b, torch.tensor([0.0 if zero == "scale" else 2.0]))
    ordered = PATHS[path](batch)
    for tensor in (ordered.s, ordered.a, ordered.b):
        assert (tensor == 0).all()
    assert action_errors(batch, ordered).item() == 0
    assert spectrum_errors(reference_spectrum(batch), ordered.s).item() == 0


@pytest.mark.parametrize("path", ["tsqr", "tsqr_tree", "reference"])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_rank_deficient_update(path: str, shape: tuple[int, int]) -> None:
    d_out, d_in = shape
    generator = torch.Generator().manual_seed(6)
    a = torch.randn(8, d_in, generator=generator)
    b = torch.randn(d_out, 3, generator=generator) @ torch.randn(3, 8, generator=generator)
    ordered = PATHS[path](Batch.of(a[None], b[None], torch.ones(1)))
    check_against_dense(ordered, a, b, 1.0, 1e-6, fp32_qr=path in FP32_QR)
    assert (ordered.s[0, 3:] < 1e-5 * ordered.s[0, 0]).all()


def test_gram_flags_the_ill_conditioned_and_only_those() -> None:
    generator = torch.Generator().manual_seed(7)
    conditions = [1.0, 1e7, 1e3, 1e9, 10.0]
    b = torch.stack([ill_conditioned(40, 6, condition, generator) for condition in conditions])
    b = torch.cat([b, torch.zeros(1, 40, 6)])  # an adapter's B before training
    a = torch.randn(6, 6, 48, generator=generator)
    _, index = gram_factors(Batch.of(a, b, torch.ones(6)), Stages())
    assert index.tolist() == [0, 2, 4]


def test_flagging_does_not_depend_on_the_lengths_of_columns() -> None:
    """Columns of very different length are no trouble for a Cholesky factorisation."""
    generator = torch.Generator().manual_seed(8)
    b = torch.randn(1, 40, 6, generator=generator) * torch.logspace(0, -12, 6)
    a = torch.randn(1, 6, 48, generator=generator)
    batch = Batch.of(a, b, torch.ones(1))
    ordered, index = gram_factors(batch, Stages())
    assert index.tolist() == [0]
    assert action_errors(batch, ordered).item() < 1e-6


def test_small_singular_values_keep_their_relative_accuracy() -> None:
    """The root of an eigenvalue of a Gram matrix is noise below 1e-8 of the largest; row lengths are not."""
    generator = torch.Generator().manual_seed(9)
    b = ill_conditioned(40, 3, 1.0, generator)
    a = torch.linalg.qr(torch.randn(48, 3, generator=generator).double())[0].mT * torch.tensor(
        [[1.0], [1e-5], [1e-10]], dtype=torch.float64
    )
    ordered, index = gram_factors(Batch.of(a[None], b[None], torch.ones(1)), Stages())
    _, s, _ = dense_svd(a, b, 1.0)
    assert len(index) == 1
    assert ((ordered.s[0] - s[:3]).abs() < 1e-14).all()
    assert abs(ordered.s[0, 2] / s[2] - 1) < 1e-3


@pytest.mark.parametrize("path", ["gram", "tsqr", "reference"])
def test_result_is_repeatable_and_independent_of_the_batch(path: str) -> None:
    """Bitwise equal on repetition; 1e-6 of the largest entry (FP32 rounding) alone or in company."""
    generator = torch.Generator().manual_seed(10)
    a = torch.randn(9, 8, 64, generator=generator)
    b = torch.randn(9, 48, 8, generator=generator) * 0.7 ** torch.arange(8)
    batch = Batch.of(a, b, torch.full((9,), 2.0))
    together, _ = construct(batch, path, Stages())  # type: ignore[arg-type]
    again, _ = construct(Batch.of(a, b, torch.full((9,), 2.0)), path, Stages())  # type: ignore[arg-type]
    for name in ("s", "a", "b"):
        assert torch.equal(getattr(together, name), getattr(again, name))
    for i in range(9):
        alone, _ = construct(batch.select(torch.tensor([i])), path, Stages())  # type: ignore[arg-type]
        assert torch.allclose(alone.s[0], together.s[i], rtol=1e-6 if path == "tsqr" else 1e-12)
        for name in ("a", "b"):
            expected = getattr(together, name)[i]
            assert (getattr(alone, name)[0] - expected).abs().max() < 1e-6 * expected.abs().max()


@pytest.mark.parametrize(("rows", "tile"), [(30, 100), (30, 10), (29, 7), (64, 8), (65, 8), (5, 1)])
def test_tsqr_tree_is_an_orthogonal_factorisation(rows: int, tile: int) -> None:
    """Ragged last leaves, unpaired nodes and tiles below the rank; FP64, so that 1e-13 is the limit."""
    x = torch.randn(3, rows, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
    tree = tsqr(x, tile)
    q = tree.apply(torch.eye(5, dtype=torch.float64).expand(3, 5, 5))
    assert q.shape == x.shape
    assert (q @ tree.r - x).abs().max() < 1e-13
    assert (q.mT @ q - torch.eye(5)).abs().max() < 1e-13
    assert (tree.r.tril(-1) == 0).all()


def test_evd_is_descending_clamped_and_signed() -> None:
    x = torch.randn(4, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(11))
    gram = x @ x.mT
    values, vectors = eigh_descending(gram)
    assert (values >= 0).all()
    assert (values[:, :-1] >= values[:, 1:]).all()
    assert torch.allclose((vectors * values[:, None, :]) @ vectors.mT, gram, atol=1e-12)
    pivot = vectors.abs().argmax(dim=1, keepdim=True)
    assert (vectors.gather(1, pivot) > 0).all()


def test_errors_see_a_wrong_result() -> None:
    generator = torch.Generator().manual_seed(12)
    a, b = torch.randn(2, 4, 20, generator=generator), torch.randn(2, 24, 4, generator=generator)
    batch = Batch.of(a, b, torch.ones(2))
    good = reference_factors(batch, Stages())
    bad_a = good.a.clone()
    bad_a[1, 0] *= 1.001
    action = action_errors(batch, Ordered(good.s, bad_a, good.b))
    assert action[0] < MAX_ACTION_ERROR < action[1]
    bad_a[1, 0, 0] = torch.nan
    assert action_errors(batch, Ordered(good.s, bad_a, good.b))[1] == torch.inf
    spectrum = spectrum_errors(good.s, good.s * torch.tensor([[1.0], [1.001]]))
    assert spectrum[0] < MAX_SPECTRUM_ERROR < spectrum[1]


def test_batched_baselines_equal_their_pairwise_forms() -> None:
    generator = torch.Generator().manual_seed(13)
    a, b = torch.randn(5, 6, 30, generator=generator), torch.randn(5, 40, 6, generator=generator)
    for name in ("florist", "spectral_transform"):
        pairwise = recompression.METHODS[name](a, b, Stages())
        batched = recompression.METHODS[f"{name}_batched"](a, b, Stages())
        assert torch.allclose(pairwise.s, batched.s, rtol=1e-6)
        assert torch.allclose(pairwise.b @ pairwise.a, batched.b @ batched.a, atol=1e-4)


def test_fraq_takes_more_than_one_batch() -> None:
    generator = torch.Generator().manual_seed(14)
    a, b = torch.randn(50, 3, 12, generator=generator), torch.randn(50, 10, 3, generator=generator)
    ordered = partial(recompression.METHODS["fraq"], stages=Stages())(a, b)
    batch = Batch.of(a, b, torch.ones(50))
    assert ordered.s.shape == (50, 3)
    assert action_errors(batch, ordered).max() < 3e-6


def test_a_module_of_rank_one_is_judged_by_all_probes_together() -> None:
    """A probe across the only direction of a module says nothing of it, however exact its factors are."""
    from loraforge.factor.batch import Batch, Ordered
    from loraforge.factor.engine import PROBES, action_errors

    d_in, d_out = 64, 32
    probes = torch.randn(d_in, PROBES, dtype=torch.float64, generator=torch.Generator().manual_seed(20261130))
    a = torch.randn(1, 1, d_in, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    a -= (a @ probes[:, 0]) / probes[:, 0].square().sum() * probes[:, 0]
    b = torch.randn(1, d_out, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    batch = Batch.of(a.float(), b.float(), torch.ones(1, dtype=torch.float64))
    root = (batch.a.norm() / batch.b.norm()).sqrt()
    s = (batch.a.norm() * batch.b.norm()).reshape(1, 1)
    ordered = Ordered(s, (batch.a / root).float(), (batch.b * root).float())
    assert action_errors(batch, ordered).item() < 1e-6
