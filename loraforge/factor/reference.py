"""FP64 references: what acceptance measures the other paths against, and the last resort among the paths."""

from __future__ import annotations

import torch
from torch import Tensor

from loraforge.factor.batch import Batch, Ordered
from loraforge.factor.stages import Stages


def reference_factors(batch: Batch, stages: Stages) -> Ordered:
    """Ordered factors from Householder QR of both sides and an SVD of the small core, FP64 throughout.

    Never forms dW, and never squares a singular value.
    """
    with stages("qr"):
        q_x, r_x = torch.linalg.qr(batch.x)
        q_y, r_y = torch.linalg.qr(batch.y.mT)
    with stages("svd"):
        u, s, vh = torch.linalg.svd(r_x @ r_y.mT)
    with stages("apply"):
        root = (s * batch.gain[:, None]).sqrt()
        return batch.ordered(s, q_x @ (u * root[:, None, :]), (q_y @ vh.mT).mT * root[:, :, None])


def reference_spectrum(batch: Batch) -> Tensor:
    """Singular values [m, r] of the updates, descending, FP64: the singular values of R_X R_Y^T."""
    r_x = torch.linalg.qr(batch.x, mode="r").R
    r_y = torch.linalg.qr(batch.y.mT, mode="r").R
    values: Tensor = torch.linalg.svdvals(r_x @ r_y.mT)
    return values * batch.gain[:, None]


def dense_svd(a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """U [d_out, n], s [n], V^T [n, d_in] of one dense ``scale * b @ a`` in FP64, n = min(d_in, d_out).

    For tests: it costs min(d)^2 max(d) where the paths above cost r^2 d.
    """
    u, s, vh = torch.linalg.svd(scale * (b.to(torch.float64) @ a.to(torch.float64)), full_matrices=False)
    return u, s, vh
