"""The core problem of every one-sided path: a batched symmetric EVD, ordered and repeatable."""

from __future__ import annotations

import torch
from torch import Tensor


def eigh_descending(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues [m, n] descending and clamped at zero, eigenvectors [m, n, n] in columns, of FP64 ``gram``.

    LAPACK, a matrix at a time; only the lower triangle is read. The sign of an eigenvector is fixed by making
    its entry of largest magnitude positive.
    """
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(-1).clamp_min(0.0), vectors.flip(-1)
    pivot = vectors.abs().argmax(dim=-2, keepdim=True)
    return values, vectors * torch.where(vectors.gather(-2, pivot) < 0, -1.0, 1.0)


def ordered_rows(vectors: Tensor, core: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Singular values as lengths of ``z = (V^T core) y``, with V [m, r, r] and z [m, r, d] in their order.

    ``core`` [m, r, r] times ``y`` [m, r, d] has the singular values wanted, and V its left singular vectors.
    The length of row j is accurate to eps * s_1, where the root of an eigenvalue is so only to
    sqrt(eps) * s_1: the penalty of squaring the spectrum stays in V. Small values may then change places, so
    all three are sorted.
    """
    z = (vectors.mT @ core) @ y
    s = torch.linalg.vector_norm(z, dim=-1)
    if bool((s[:, :-1] < s[:, 1:]).any()):
        s, order = s.sort(dim=-1, descending=True, stable=True)
        vectors = vectors.gather(2, order[:, None, :].expand_as(vectors))
        z = z.gather(1, order[:, :, None].expand_as(z))
    return s, vectors, z
