"""JD-Full: min sum_i w_i |dW_i - U S_i V^T|_F^2 over orthonormal U [d_out, r], V [d_in, r] and S_i [r, r].

For given bases S_i = U^T dW_i V is best, and the objective is sum w_i |dW_i|^2 - sum w_i |U^T dW_i V|^2: each step
fixes one basis and takes the r leading left singular vectors of [sqrt(w_i) dW_i V]_i for the other, which cannot lower
what is kept. w_i = 1 is the raw objective, in which adapters of large norm rule; w_i = 1 / |dW_i|^2 gives each the same
say.

Nothing dense: the iteration runs on the coordinates of :attr:`~loraforge.cts.factors.Stack.reduced`.

A power step, U <- orth(sum w_i dW_i V V^T dW_i^T U), cannot lower what is kept either, and costs products and one QR
where an eigendecomposition of p x p costs more; it needs more steps to the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraforge.cts.factors import SideBySide, Stack, better

ITERATIONS = 100
SEEDS = (101, 202)
Step = Callable[[SideBySide, Tensor, Tensor], Tensor]


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
    out, into, core = target.reduced
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


def _alternate(core: SideBySide, rank: int, iterations: int, seed: int, step: Step) -> tuple[Tensor, Tensor]:
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


def _exact_step(core: SideBySide, right: Tensor, left: Tensor) -> Tensor:
    """The leading left singular vectors of [dW_i right]_i, as many as ``left`` [g, p, k] has."""
    p, kept = left.shape[-2:]
    if kept == p:
        return left  # all directions: any basis of them does
    inner = core.inner(right)
    vectors: Tensor
    if core.adapters * right.shape[-1] >= p:
        # sum_i b_i (inner_i inner_i^T) b_i^T, whose middle is r x r
        vectors = torch.linalg.eigh(core.images(inner @ inner.mT) @ core.b.mT)[1]
        return vectors[..., -kept:].flip(-1)
    # fewer images than rows: the small side's vectors, and QR for directions in which there is nothing
    images = core.images(inner)
    vectors = torch.linalg.eigh(images.mT @ images)[1]
    basis: Tensor = torch.linalg.qr(images @ vectors[..., -kept:].flip(-1))[0]
    return basis


def _power_step(core: SideBySide, right: Tensor, left: Tensor) -> Tensor:
    inner = core.inner(right)
    # r x r in the middle: the other way to bracket it is k x k
    back = (inner @ inner.mT) @ core.transposed.inner(left)
    basis: Tensor = torch.linalg.qr(core.outer(back))[0]
    return basis
