"""The FP64-Gram path: no Q, two thin products, for factors that are not ill-conditioned.

    X^T X = L L^T;  G = L^T (Y Y^T) L = V S^2 V^T;  X' = X L^-T V S^1/2;  Y' = S^-1/2 V^T L^T Y

X L^-T has orthonormal columns up to eps * cond(X)^2, and X' Y' = X Y holds for any invertible L, so that what a
poor L costs is order and optimality, never the update itself. A matrix whose Cholesky factorisation breaks
down, or comes near it, is not done here but reported.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loraforge.factor.batch import Batch, Ordered
from loraforge.factor.evd import eigh_descending, ordered_rows
from loraforge.factor.stages import Stages

# Least squared sine of the angle between a column of X and the columns before it. At 1e-10 the orthogonality of
# X L^-T is good to about eps / 1e-10 = 2e-6, well inside both acceptance limits.
MIN_SQUARED_SINE = 1e-10


def gram_factors(batch: Batch, stages: Stages) -> tuple[Ordered, Tensor]:
    """Ordered factors of the well-conditioned updates of ``batch``, and their indices [n] (int64)."""
    with stages("gram"):
        gram = batch.x.mT @ batch.x
        lower, info = torch.linalg.cholesky_ex(gram)
        diagonal, norms = lower.diagonal(dim1=-2, dim2=-1), gram.diagonal(dim1=-2, dim2=-1)
        # invariant to the lengths of the columns, as the Cholesky factorisation itself is; NaN compares false
        good = (info == 0) & (diagonal.square() > MIN_SQUARED_SINE * norms).all(dim=-1)
        index = good.nonzero().squeeze(-1)
        if len(index) < len(batch):
            batch, lower = batch.select(index), lower[index]
        core = lower.mT @ (batch.y @ batch.y.mT) @ lower
    with stages("evd"):
        _, vectors = eigh_descending(core)
    with stages("apply"):
        s, vectors, z = ordered_rows(vectors, lower.mT, batch.y)
        s, root, inverse = batch.roots(s)
        basis = torch.linalg.solve_triangular(lower.mT, vectors, upper=True)
        return batch.ordered(s, batch.x @ (basis * root[:, None, :]), z.mul_(inverse[:, :, None])), index
