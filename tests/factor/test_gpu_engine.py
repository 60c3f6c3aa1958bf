"""The GPU engine's schedule, guards and fallbacks over FP64 emulations of its kernels, against dense FP64 SVDs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loraforge.errors import InputError, UsageError
from loraforge.factor.batch import Batch, Ordered
from loraforge.factor.engine import (
    MAX_ACTION_ERROR,
    MAX_SPECTRUM_ERROR,
    action_errors,
    spectrum_errors,
)
from loraforge.factor.gpu import engine
from loraforge.factor.gpu.check import group_errors, root_spectrum
from loraforge.factor.gpu.engine import FAILED, GRAM, TSQR, Group, allocate, factorise_groups
from loraforge.factor.gpu.ops import TALL, WIDE, Emulated
from loraforge.factor.gram import gram_factors
from loraforge.factor.reference import dense_svd, reference_spectrum
from loraforge.factor.stages import Stages

SHAPES = [(5, 40, 24, 8), (4, 24, 40, 8), (3, 33, 33, 8), (6, 20, 17, 1), (2, 64, 16, 16)]


def group(
    m: int, d_in: int, d_out: int, r: int, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Group:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(m, r, d_in, generator=generator).to(dtype)
    b = torch.randn(m, d_out, r, generator=generator).to(dtype)
    return Group(a, b, torch.linspace(-2, 2, m, dtype=torch.float64) + 0.3)


def whole(result: engine.GroupFactors) -> Ordered:
    (part,) = result.parts
    return Ordered(result.s, part.a, part.b)


def assert_accepted(given: Group, result: engine.GroupFactors) -> None:
    batch = Batch.of(given.a, given.b, given.scale)
    ordered = whole(result)
    assert action_errors(batch, ordered).max() < MAX_ACTION_ERROR
    assert spectrum_errors(reference_spectrum(batch), ordered.s).max() < MAX_SPECTRUM_ERROR
    assert (ordered.s[:, :-1] >= ordered.s[:, 1:]).all()


@pytest.mark.parametrize("method", ["gram", "tsqr", "auto"])
@pytest.mark.parametrize("unit", [3, 100])
def test_every_prefix_is_the_best_update_of_its_rank(method: engine.Method, unit: int) -> None:
    groups = [group(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    results = factorise_groups(groups, Emulated(), method=method, unit=unit)
    for given, result in zip(groups, results, strict=True):
        assert_accepted(given, result)
        assert result.path.tolist() == [TSQR if method == "tsqr" else GRAM] * len(given)
        for j in range(len(given)):
            scale = float(given.scale[j])
            _, s, _ = dense_svd(given.a[j], given.b[j], scale)
            update = scale * given.b[j].double() @ given.a[j].double()
            for k in range(1, given.key[2] + 1):
                a, b = result.factors(j, k)
                best = (s[k:] ** 2).sum().sqrt()
                assert torch.linalg.norm(update - b.double() @ a.double()) <= best + 1e-5 * s[0]


def test_results_are_those_of_the_cpu_path() -> None:
    given = group(4, 40, 24, 8)
    ordered = whole(factorise_groups([given], Emulated(), method="gram")[0])
    cpu, index = gram_factors(Batch.of(given.a, given.b, given.scale), Stages())
    assert len(index) == 4
    assert torch.allclose(ordered.s, cpu.s, rtol=1e-9)
    assert torch.allclose(ordered.a, cpu.a, atol=1e-5)
    assert torch.allclose(ordered.b, cpu.b, atol=1e-5)


def damaged(kind: str) -> Group:
    given = group(6, 40, 24, 8)
    a, b, scale = given.a.clone(), given.b.clone(), given.scale.clone()
    if kind == "zero_b":
        b[2] = 0
    elif kind == "zero_a":
        a[2] = 0
    elif kind == "zero_scale":
        scale[2] = 0
    elif kind == "rank_deficient":
        b[2, :, 3:] = b[2, :, :1]
    elif kind == "nearly_dependent":
        b[2, :, 1] = b[2, :, 0] + 1e-6 * b[2, :, 1]
    elif kind == "small":
        b[2] *= 1e-30
    elif kind == "large":
        b[2] *= 1e30
    elif kind == "both_small":
        a[2], b[2] = a[2] * 1e-30, b[2] * 1e-30
    return Group(a, b, scale)


DAMAGE = (
    "zero_b", "zero_a", "zero_scale", "rank_deficient", "nearly_dependent", "small", "large", "both_small"
)  # fmt: skip


@pytest.mark.parametrize("method", ["auto", "tsqr"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_one_odd_matrix_changes_no_other(kind: str, method: engine.Method) -> None:
    plain = whole(factorise_groups([group(6, 40, 24, 8)], Emulated(), method=method)[0])
    given = damaged(kind)
    result = factorise_groups([given], Emulated(), method=method)[0]
    assert FAILED not in result.path.tolist()
    others = [0, 1, 3, 4, 5]
    ordered = whole(result)
    assert torch.equal(ordered.a[others], plain.a[others])
    assert torch.equal(ordered.b[others], plain.b[others])
    if method == "auto":
        bad = kind in ("zero_b", "rank_deficient", "nearly_dependent")
        assert result.path.tolist() == [TSQR if j == 2 and bad else GRAM for j in range(6)]
    if kind not in ("both_small",):
        assert_accepted(given, result)
    else:  # FP32 holds the factors, but not the update
        batch = Batch.of(given.a, given.b, given.scale)
        assert spectrum_errors(reference_spectrum(batch), result.s).max() < MAX_SPECTRUM_ERROR


def test_a_cancelling_product_is_not_left_to_gram() -> None:
    """The core of X Y loses half its digits and more where |X| |Y| is far above |X Y|."""
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(24, 2, generator=generator)
    b = torch.cat([base, base + 1e-4 * torch.randn(24, 2, generator=generator)], dim=1)
    right = torch.randn(2, 40, generator=generator)
    a = torch.cat([right, -right])
    given = Group(a[None], b[None], torch.ones(1, dtype=torch.float64))
    assert factorise_groups([given], Emulated(), method="gram")[0].path.tolist() == [FAILED]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("method", ["auto", "tsqr"])
def test_a_bad_value_is_named(bad: float, side: str, method: engine.Method) -> None:
    given = group(3, 40, 24, 8)
    getattr(given, side)[1, 2, 3] = bad
    named = Group(given.a, given.b, given.scale, ("one", "two.q_proj", "three"))
    with pytest.raises(InputError, match=r"two\.q_proj: holds NaN or infinite values"):
        factorise_groups([named], Emulated(), method=method)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_factors(dtype: torch.dtype) -> None:
    given = group(3, 40, 24, 8, dtype=dtype)
    assert_accepted(given, factorise_groups([given], Emulated())[0])


@pytest.mark.parametrize("method", ["gram", "tsqr", "auto"])
def test_deferred_factors_are_leading_directions_of_the_full_ones(method: engine.Method) -> None:
    groups = [group(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    groups[0].b[2] = 0  # one retried matrix in the middle of parts
    generator = torch.Generator().manual_seed(1)
    ks = [torch.randint(1, g.key[2] + 1, (len(g),), generator=generator).sort().values for g in groups]
    full = factorise_groups(groups, Emulated(), method=method)
    deferred = factorise_groups(groups, Emulated(), method=method, ks=ks, unit=4)
    for number, (given, keep) in enumerate(zip(groups, ks, strict=True)):
        assert torch.allclose(deferred[number].s, full[number].s, rtol=1e-9)
        for j, k in enumerate(keep.tolist()):
            if full[number].path[j] == FAILED:
                continue
            for got, wanted in zip(deferred[number].factors(j, k), full[number].factors(j, k), strict=True):
                assert got.shape == wanted.shape
                assert torch.allclose(got, wanted, atol=1e-5)
        built = sum(part.a.shape[0] * part.a.shape[1] for part in deferred[number].parts)
        assert built < 1.5 * int(keep.sum()) + 1
        assert sum(len(part.a) for part in deferred[number].parts) == len(given)


def test_ranks_outside_the_matrix_are_refused() -> None:
    given = group(3, 40, 24, 8)
    for keep in (torch.tensor([1, 2, 9]), torch.tensor([0, 1, 1]), torch.tensor([1, 1])):
        with pytest.raises(ValueError, match="ranks to keep"):
            factorise_groups([given], Emulated(), ks=[keep])


def test_outputs_are_filled_again() -> None:
    given = group(4, 40, 24, 8)
    out = allocate([given])
    first = whole(factorise_groups([given], Emulated(), out=out)[0])
    kept = first.a.clone()
    again = whole(factorise_groups([given], Emulated(), out=out)[0])
    assert again.a.data_ptr() == first.a.data_ptr()
    assert torch.equal(again.a, kept)


def test_nothing_to_do() -> None:
    assert factorise_groups([], Emulated()) == []
    empty = group(0, 40, 24, 8)
    (result,) = factorise_groups([empty], Emulated())
    assert result.s.shape == (0, 8)


def test_an_unknown_method() -> None:
    with pytest.raises(UsageError, match="choose from auto, gram, tsqr"):
        factorise_groups([], Emulated(), method="qr")  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", [TALL, WIDE])
def test_emulations_agree_with_each_other(layout: int) -> None:
    """Q R = X and R^T R = X^T X, through the calls that the engine makes."""
    backend = Emulated()
    x = torch.randn(3, *((20, 5) if layout == TALL else (5, 20)), generator=torch.Generator().manual_seed(0))
    gram = torch.empty(3, 5, 5, dtype=torch.float64)
    upper: Tensor = torch.empty(3, 5, 5)
    back = torch.empty_like(x)
    backend.gram(x, layout, gram)
    held = backend.tsqr_factor(x, layout, upper)
    backend.tsqr_apply(held, upper, layout, back)
    assert torch.allclose(back, x, atol=1e-5)
    assert torch.allclose(upper.mT @ upper, gram.float(), atol=1e-4)
    w, rows = backend.eigh(gram)
    assert torch.allclose(rows.mT @ (w[:, :, None] * rows), gram, atol=1e-9)


def test_the_device_reference_agrees_with_the_cpu_one() -> None:
    for kind in (*DAMAGE, "none"):
        batch = Batch.of(*(getattr(damaged(kind), name) for name in ("a", "b", "scale")))
        assert spectrum_errors(reference_spectrum(batch), root_spectrum(batch, Emulated())).max() < 1e-6


def test_checks_see_a_wrong_result() -> None:
    given = group(4, 40, 24, 8)
    (result,) = factorise_groups([given], Emulated())
    action, spectrum = group_errors(given, result, Emulated())
    assert action.max() < MAX_ACTION_ERROR
    assert spectrum.max() < MAX_SPECTRUM_ERROR
    result.parts[0].b[1, :, 0] *= 1.001
    result.s[2] *= 1.001
    action, spectrum = group_errors(given, result, Emulated())
    assert (action > MAX_ACTION_ERROR).tolist() == [False, True, False, False]
    assert (spectrum > MAX_SPECTRUM_ERROR).tolist() == [False, False, True, False]


def test_units_of_large_ranks_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a unit takes is bounded, whatever the rank; and it does not change the results."""
    given = group(5, 40, 24, 8)
    plain = whole(factorise_groups([given], Emulated())[0])
    monkeypatch.setattr(engine, "UNIT_BYTES", 2 * 8 * 8 * 8)
    assert [sum(p.stop - p.start for p in unit) for unit in engine._units([given], 100)] == [2, 2, 1]
    small = whole(factorise_groups([given], Emulated())[0])
    assert torch.allclose(small.a, plain.a, atol=1e-6)
    assert torch.allclose(small.s, plain.s, rtol=1e-12)
