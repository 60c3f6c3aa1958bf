"""Certificates against dense FP64 algebra, and what they must notice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraforge.export.certificate import action_error, energy_splits, probes
from loraforge.factor.reference import dense_svd


def ordered(a: torch.Tensor, b: torch.Tensor, scale: float, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    u, s, vh = dense_svd(a, b, scale)
    return (s[:k, None].sqrt() * vh[:k]).float(), (u[:, :k] * s[:k].sqrt()).float()


def pair(seed: int, rank: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rank, 24, generator=generator), torch.randn(40, rank, generator=generator)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 5), scale=st.sampled_from([0.1, 2.0, -3.0]))
def test_the_error_is_that_of_the_dense_truncated_update(seed: int, k: int, scale: float) -> None:
    a, b = pair(seed)
    out_a, out_b = ordered(a, b, scale, k)
    rounded = out_a.bfloat16(), out_b.bfloat16()
    u, s, vh = dense_svd(a, b, scale)
    truncated = (u[:, :k] * s[:k]) @ vh[:k]
    x = probes(24)
    wanted = torch.linalg.norm((rounded[1].double() @ rounded[0].double() - truncated) @ x)
    wanted /= torch.linalg.norm(truncated @ x)
    assert action_error((a, b), scale, out_a, rounded) == pytest.approx(float(wanted), rel=1e-3)
    assert action_error((a, b), scale, out_a, (out_a, out_b)) < 1e-5


def test_a_wrong_scale_a_swapped_direction_and_a_lost_factor_are_seen() -> None:
    a, b = pair(1)
    out_a, out_b = ordered(a, b, 2.0, 3)
    assert action_error((a, b), 1.0, out_a, (out_a, out_b)) == pytest.approx(1.0, rel=1e-4)
    assert action_error((a, b), 2.0, out_a, (out_a, out_b[:, [1, 0, 2]])) > 0.1
    assert action_error((a, b), 2.0, out_a, (out_a, 0 * out_b)) == pytest.approx(1.0)


def test_a_zero_update_is_exact_unless_something_was_added() -> None:
    a, b = torch.randn(2, 24), torch.zeros(40, 2)
    zero = torch.zeros(1, 24), torch.zeros(40, 1)
    assert action_error((a, b), 1.0, zero[0], zero) == 0.0
    assert action_error((a, b), 1.0, zero[0], (torch.ones(1, 24), torch.ones(40, 1))) == float("inf")
    assert energy_splits([np.zeros(3)], [1]) == [(1.0, 0.0)]


def test_energy_keeps_its_digits_where_little_is_lost() -> None:
    sigma = np.array([1.0, 1e-7])
    (kept, lost), other, whole = energy_splits([sigma, np.array([3.0, 2.0, 1.0]), sigma], [1, 2, 2])
    assert kept == pytest.approx(1.0, abs=1e-13)
    assert lost == pytest.approx(1e-7, rel=1e-9)
    assert other == pytest.approx((13 / 14, (1 / 14) ** 0.5))
    assert whole == (1.0, 0.0)
