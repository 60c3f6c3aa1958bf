"""JD-Full: min sum_i w_i |dW_i - U S_i V^T|_F^2 over orthonormal U [d_out, r], V [d_in, r] and S_i [r, r].

For given bases S_i = U^T dW_i V is best, and the objective is sum w_i |dW_i|^2 - sum w_i |U^T dW_i V|^2: each step
fixes one basis and takes the r leading left singular vectors of [sqrt(w_i) dW_i V]_i for the other, which cannot lower
what is kept. w_i = 1 is the raw objective, in which adapters of large norm rule; w_i = 1 / |dW_i|^2 gives each the same
say.

Nothing dense: with QR of all factors of a module side by side, U = Q_b U', V = Q_a V', and the iteration runs on
coordinates R_b,i [p, r_i] and R_a,i [q, r_i] with p = min(d_out, sum r_i), q = min(d_in, sum r_i).

A power step, U <- orth(sum w_i dW_i V V^T dW_i^T U), cannot lower what is kept either, and costs products and one QR
where an eigendecomposition of p x p costs more; it needs more steps to the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraforge.cts.factors import Stack, better

ITERATIONS = 100
SEEDS = (101, 202)
Step = Callable[[Stack, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Bases:
    """Shared bases of g modules: ``left`` U [g, d_out, r], ``right`` V [g, d_in, r], orthonormal.

    Fewer than r directions mean that these hold all updates of the module whole.

    ``error``: float64 [g], the weighted objective. ``seed``: int64 [g], the start that reached it.
    """

    left: Tensor
    right: Tensor
    error: Tensor
    seed: Tensor


def joint_full(
    updates: Stack,
    rank: int,
    *,
    weighted: bool = False,
    iterations: int = ITERATIONS,
    seeds: Sequence[int] = SEEDS,
    power: bool = False,
) -> Bases:
    """Shared bases of ``rank`` directions, of every module the best start of ``seeds``.

    ``rank`` is at most min(d_in, d_out). ``power``: power steps instead of exact ones. Arithmetic is that of
    ``updates``: FP32 or FP64.
    """
    target = updates.weighted(norm_weights(updates)) if weighted else updates
    total = target.squared_norms().sum(dim=1).double()
    out, r_b = _orthonormal(target.b)
    into, r_a = _orthonormal(target.a.mT)
    core = Stack(r_a.mT, r_b)
    best: Bases | None = None
    for seed in seeds:
        left, right = _alternate(core, rank, iterations, seed, _power_step if power else _exact_step)
        kept = torch.linalg.vector_norm(core.core(left, right), dim=(1, 2, 3)).double().square()
        found = Bases(
            out @ left,
            into @ right,
            (total - kept).clamp_min(0),
            torch.full_like(kept, seed, dtype=torch.int64),
        )
        best = better(best, found)
    assert best is not None
    return best


def norm_weights(updates: Stack) -> Tensor:
    """1 / |dW_i|_F^2, [g, n]; 0 for a zero update, which any bases fit."""
    norms = updates.squared_norms()
    return torch.where(norms > 0, 1 / torch.where(norms > 0, norms, 1.0), 0.0)


def _orthonormal(factors: Tensor) -> tuple[Tensor, Tensor]:
    """Q [g, d, p] and R_i [g, n, p, r] of factors [g, n, d, r] side by side, p = min(d, n r)."""
    g, n, d, r = factors.shape
    q, upper = torch.linalg.qr(factors.permute(0, 2, 1, 3).reshape(g, d, n * r))
    return q, upper.reshape(g, -1, n, r).permute(0, 2, 1, 3)


def _alternate(core: Stack, rank: int, iterations: int, seed: int, step: Step) -> tuple[Tensor, Tensor]:
    """Bases [g, p, <= rank] and [g, q, <= rank] of reduced factors, from a random start that depends on ``seed``."""
    generator = torch.Generator().manual_seed(seed)

    def start(width: int) -> Tensor:
        drawn = torch.randn(width, min(rank, width), dtype=torch.float64, generator=generator)
        basis: Tensor = torch.linalg.qr(drawn)[0].to(core.a)
        return basis.expand(len(core.a), -1, -1)

    right, left = start(core.a.shape[-1]), start(core.b.shape[-2])
    for _ in range(iterations):
        left = step(core, right, left)
        right = step(core.transposed, left, right)
    return left, right


def _exact_step(core: Stack, right: Tensor, left: Tensor) -> Tensor:
    """The leading left singular vectors of [dW_i right]_i, as many as ``left`` [g, p, k] has."""
    images = (core.b @ (core.a @ right[:, None])).permute(0, 2, 1, 3).flatten(2)
    if left.shape[-1] == left.shape[-2]:
        return left  # all directions: any basis of them does
    kept = left.shape[-1]
    vectors: Tensor
    if images.shape[-1] >= images.shape[-2]:
        vectors = torch.linalg.eigh(images @ images.mT)[1]
        return vectors[..., -kept:].flip(-1)
    # fewer images than rows: the small side's vectors, and QR for directions in which there is nothing
    vectors = torch.linalg.eigh(images.mT @ images)[1]
    basis: Tensor = torch.linalg.qr(images @ vectors[..., -kept:].flip(-1))[0]
    return basis


def _power_step(core: Stack, right: Tensor, left: Tensor) -> Tensor:
    inner = core.a @ right[:, None]
    back = inner @ (inner.mT @ (core.b.mT @ left[:, None]))
    basis: Tensor = torch.linalg.qr((core.b @ back).sum(dim=1))[0]
    return basis
