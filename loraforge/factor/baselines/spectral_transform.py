"""SpecTraL: FP32 QR of both factors, FP64 SVD of the core, FP32 reconstruction (paper, sections B.2 and B.8)."""

from __future__ import annotations

import torch
from torch import Tensor

from loraforge.factor.batch import Ordered
from loraforge.factor.stages import Stages


def spectral_transform(a: Tensor, b: Tensor, stages: Stages, *, batched: bool = False) -> Ordered:
    """Recompress ``a`` [m, r, d_in], ``b`` [m, d_out, r] a pair at a time, or all together if ``batched``."""
    if batched:
        return _recompress(a, b, stages)
    pairs = [_recompress(a[i], b[i], stages) for i in range(a.shape[0])]
    return Ordered(*(torch.stack([getattr(pair, name) for pair in pairs]) for name in ("s", "a", "b")))


def _recompress(a: Tensor, b: Tensor, stages: Stages) -> Ordered:
    with stages("qr"):
        q_b, r_b = torch.linalg.qr(b)
        q_a, r_a = torch.linalg.qr(a.mT)
    with stages("svd_core"):
        u, s, vh = torch.linalg.svd(r_b.to(torch.float64) @ r_a.to(torch.float64).mT)
    with stages("apply"):
        root = s.sqrt()
        left = q_b @ (u * root[..., None, :]).to(torch.float32)
        right = (root[..., :, None] * vh).to(torch.float32) @ q_a.mT
        return Ordered(s, right, left)
