"""Ordered factors in the norm of activations.

The best rank-k update in |(dW - dW_k) C^1/2|_F is U_k U_k^T dW with U_k the leading left singular vectors of
dW C^1/2: no root and no inverse of C is needed, and C may be singular. From factors, per module, in FP64:

    B = Q R;   G = s^2 R (A C A^T) R^T = V diag(sigma^2) V^T;   B' = Q V g,   A' = g^-1 s V^T R A

sigma are the singular values of dW C^1/2, g gives both factors rows and columns of equal length, and a prefix of k
directions is the optimum of rank k, as in the factor cache. Nothing is larger than r x d.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loraforge.factor.evd import eigh_descending

# Share of the mean second moment that every input is given. What calibration texts never excite is not free to lose:
# an adapter meets other inputs than the base does over them, not least its own.
SHRINKAGE = 0.5


def shrunk(second: Tensor, share: float = SHRINKAGE) -> Tensor:
    """``(1 - share) C + share tr(C) / d I``, float64 [d, d]."""
    d = len(second)
    return (1 - share) * second + share * second.trace() / d * torch.eye(d, dtype=second.dtype)


def whitened_factors(a: Tensor, b: Tensor, scale: float, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ordered factors of ``scale * b @ a`` in the norm of ``second``.

    Parameters
    ----------
    a, b: [r, d_in] and [d_out, r], any float type. second: C, float64 [d_in, d_in], symmetric, not negative.

    Returns sigma [r] (descending, of dW C^1/2), A' [r, d_in] and B' [d_out, r], float64; B' A' is the whole update.
    """
    a, b = a.double(), b.double()
    q, upper = torch.linalg.qr(b)
    moved = scale * (upper @ a)
    values, vectors = eigh_descending(moved @ second @ moved.mT)
    rows = vectors.mT @ moved
    length = torch.linalg.vector_norm(rows, dim=1)
    gain = torch.where(length > 0, length, 1.0).sqrt()
    return values.sqrt(), rows / gain[:, None], (q @ vectors) * gain
