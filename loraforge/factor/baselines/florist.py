"""FLoRIST: an SVD of each factor, then one of the small core, all in FP64 (paper, sections B.2 and B.8)."""

from __future__ import annotations

import torch
from torch import Tensor

from loraforge.factor.batch import Ordered
from loraforge.factor.stages import Stages


def florist(a: Tensor, b: Tensor, stages: Stages, *, batched: bool = False) -> Ordered:
    """Recompress ``a`` [m, r, d_in], ``b`` [m, d_out, r] a pair at a time, or all together if ``batched``."""
    if batched:
        return _recompress(a, b, stages)
    pairs = [_recompress(a[i], b[i], stages) for i in range(a.shape[0])]
    return Ordered(*(torch.stack([getattr(pair, name) for pair in pairs]) for name in ("s", "a", "b")))


def _recompress(a: Tensor, b: Tensor, stages: Stages) -> Ordered:
    with stages("svd_factors"):
        # both as tall matrices: LAPACK then starts with a QR factorisation, and takes two thirds of the time
        u_b, s_b, vh_b = torch.linalg.svd(b.to(torch.float64), full_matrices=False)
        v_a, s_a, uh_a = torch.linalg.svd(a.mT.to(torch.float64), full_matrices=False)
    with stages("svd_core"):
        core = (s_b[..., :, None] * (vh_b @ uh_a.mT)) * s_a[..., None, :]
        u, s, vh = torch.linalg.svd(core)
    with stages("apply"):
        root = s.sqrt()
        left = (u_b @ (u * root[..., None, :])).to(torch.float32)
        right = ((root[..., :, None] * vh) @ v_a.mT).to(torch.float32)
        return Ordered(s, right, left)
