"""Stabilised FraQ: library FP32 QR of the smaller side, FP64 Gram, EVD and reconstruction (paper, B.2 and B.8)."""

from __future__ import annotations

import torch
from torch import Tensor

from loraforge.factor.batch import Ordered
from loraforge.factor.stages import Stages

MAX_BATCH = 24


def fraq(a: Tensor, b: Tensor, stages: Stages) -> Ordered:
    """Recompress ``a`` [m, r, d_in], ``b`` [m, d_out, r] in batches of at most 24."""
    parts = [
        _recompress(a[i : i + MAX_BATCH], b[i : i + MAX_BATCH], stages)
        for i in range(0, a.shape[0], MAX_BATCH)
    ]
    if len(parts) == 1:
        return parts[0]
    return Ordered(*(torch.cat([getattr(part, name) for part in parts]) for name in ("s", "a", "b")))


def _recompress(a: Tensor, b: Tensor, stages: Stages) -> Ordered:
    transposed = b.shape[1] > a.shape[2]
    x, y = (a.mT, b.mT) if transposed else (b, a)
    with stages("qr"):
        q, r = torch.linalg.qr(x)
    with stages("gram"):
        h = r.to(torch.float64) @ y.to(torch.float64)
        gram = h @ h.mT
    with stages("evd"):
        values, vectors = torch.linalg.eigh(gram)
        values, vectors = values.flip(-1).clamp_min(0.0), vectors.flip(-1)
    with stages("apply"):
        s = values.sqrt()
        # below sqrt(eps) of the largest, the root of an eigenvalue is rounding noise
        live = s > s[:, :1] * torch.finfo(torch.float64).eps ** 0.5
        inverse = torch.where(live, torch.where(live, s, 1.0).rsqrt(), 0.0)
        left = (q.to(torch.float64) @ (vectors * s.sqrt()[:, None, :])).to(torch.float32)
        right = ((inverse[:, :, None] * vectors.mT) @ h).to(torch.float32)
        return (
            Ordered(s, left.mT.contiguous(), right.mT.contiguous()) if transposed else Ordered(s, right, left)
        )
