"""JD-Diag: min sum_i |dW_i - U diag(s_i) V^T|_F^2 over U [d_out, r], V [d_in, r] and s_i [r].

Bases of diagonal cores cannot be orthonormal without loss, so they are free: this is a canonical polyadic decomposition
of the tensor of updates, fitted by alternating least squares. Each step solves for one of U, V, s with the other two
fixed, from Gram matrices of r x r and products with factors; columns of U and V have unit length, s takes the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraforge.cts.factors import SideBySide, Stack, better
from loraforge.cts.full import ITERATIONS, SEEDS

# Relative to the mean diagonal of a Gram matrix: parallel directions make it singular.
_RIDGE = 1e-10


@dataclass(frozen=True)
class DiagonalBases:
    """Shared directions of g modules: ``left`` U [g, d_out, r], ``right`` V [g, d_in, r], ``scales`` s [g, n, r].

    ``error``: float64 [g], the raw objective. ``seed``: int64 [g], the start that reached it.
    """

    left: Tensor
    right: Tensor
    scales: Tensor
    error: Tensor
    seed: Tensor


def joint_diagonal(
    updates: Stack, rank: int, *, iterations: int = ITERATIONS, seeds: Sequence[int] = SEEDS
) -> DiagonalBases:
    """Shared directions of ``rank``, of every module the best start of ``seeds``. FP64 inside."""
    doubled = Stack(updates.a.double(), updates.b.double())
    total = doubled.squared_norms().sum(dim=1)
    out, into, core = doubled.reduced
    best: DiagonalBases | None = None
    for seed in seeds:
        left, right, scales = _fit(core, rank, iterations, seed)
        found = DiagonalBases(
            out @ left,
            into @ right,
            scales,
            _error(core, total, left, right, scales),
            torch.full_like(total, seed, dtype=torch.int64),
        )
        best = better(best, found)
    assert best is not None
    return best


def _fit(updates: SideBySide, rank: int, iterations: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    g, _, d_in = updates.a.shape
    generator = torch.Generator().manual_seed(seed)
    right = _unit(torch.randn(d_in, rank, dtype=torch.float64, generator=generator).to(updates.a))
    right = right.expand(g, -1, -1)
    scales = (
        torch.rand(updates.adapters, rank, dtype=torch.float64, generator=generator)
        .to(updates.a)
        .expand(g, -1, -1)
    )
    left = right[:, :0]
    for _ in range(iterations):
        left = _unit(_side(updates, right, scales))
        right = _unit(_side(updates.transposed, left, scales))
        scales = _solve((left.mT @ left) * (right.mT @ right), _diagonals(updates, left, right).mT).mT
    return left, right, scales


def _side(updates: SideBySide, right: Tensor, scales: Tensor) -> Tensor:
    """The best left directions [g, d_out, r] for given right ones and scales."""
    image = updates.outer(updates.inner(right) * scales[:, :, None, :])
    return _solve((right.mT @ right) * (scales.mT @ scales), image.mT).mT


def _solve(gram: Tensor, wanted: Tensor) -> Tensor:
    ridge = _RIDGE * gram.diagonal(dim1=-2, dim2=-1).mean(dim=-1).clamp_min(torch.finfo(gram.dtype).tiny)
    found: Tensor = torch.linalg.solve(
        gram + torch.diag_embed(ridge[:, None].expand(-1, gram.shape[-1])), wanted
    )
    return found


def _diagonals(updates: SideBySide, left: Tensor, right: Tensor) -> Tensor:
    """u_k^T dW_i v_k, [g, n, r]."""
    return (updates.transposed.inner(left) * updates.inner(right)).sum(dim=-2)


def _error(updates: SideBySide, total: Tensor, left: Tensor, right: Tensor, scales: Tensor) -> Tensor:
    gram = (left.mT @ left) * (right.mT @ right)
    fitted = ((scales @ gram) * scales).sum(dim=(1, 2))
    return (total - 2 * (scales * _diagonals(updates, left, right)).sum(dim=(1, 2)) + fitted).clamp_min(0)


def _unit(columns: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(columns, dim=-2, keepdim=True)
    return columns / torch.where(length > 0, length, 1.0)
