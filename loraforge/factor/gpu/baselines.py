"""Published methods over a fleet on one device: pair at a time as published, and batched.

Matched FraQ takes the paper's batches of 24 and torch's QR; the batched forms take large ones. Every EVD is that of
our own paths. The batched forms have no SVD, which no library offers in batches above order 32: the core's and, in
FLoRIST, those of the factors come from the EVD of FP64 Gram matrices. That costs singular values below 1e-8 of the
largest, far under what acceptance asks for, and saves most of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from loraforge.factor.baselines.florist import florist
from loraforge.factor.baselines.fraq import MAX_BATCH
from loraforge.factor.baselines.spectral_transform import spectral_transform
from loraforge.factor.batch import Ordered
from loraforge.factor.gpu.engine import Group, GroupFactors
from loraforge.factor.gpu.ops import Backend
from loraforge.factor.stages import Stages

PAIRWISE = {"spectral_transform": spectral_transform, "florist": florist}
LARGE_BATCH = 512

_FP64, _FP32 = torch.float64, torch.float32
# below it, the root of an eigenvalue is rounding noise
_LEAST = torch.finfo(_FP64).eps ** 0.5


def run(
    method: str,
    groups: Sequence[Group],
    out: Sequence[GroupFactors],
    backend: Backend,
    stages: Stages | None = None,
) -> None:
    """Fill ``out`` (full rank; see :func:`loraforge.factor.gpu.engine.allocate`) by ``method`` of ``METHODS``."""
    recompress, batch = METHODS[method]
    clock = stages or Stages()
    for group, result in zip(groups, out, strict=True):
        (part,) = result.parts
        for start in range(0, len(group), batch):
            rows = slice(start, min(len(group), start + batch))
            ordered = recompress(group.a[rows], group.b[rows], backend, clock)
            result.s[rows], part.a[rows], part.b[rows] = ordered.s, ordered.a, ordered.b


def _pairwise(method: str, a: Tensor, b: Tensor, backend: Backend, stages: Stages) -> Ordered:
    return PAIRWISE[method](a, b, stages)


def _fraq(a: Tensor, b: Tensor, backend: Backend, stages: Stages) -> Ordered:
    """QR of the smaller side, EVD of the FP64 Gram matrix of R and the other side (paper, sections B.2 and B.8)."""
    transposed = b.shape[1] > a.shape[2]
    x, y = (a.mT, b.mT) if transposed else (b, a)
    with stages("qr"):
        q, r = torch.linalg.qr(x)
    with stages("gram"):
        h = r.to(_FP64) @ y.to(_FP64)
        gram = h @ h.mT
    with stages("evd"):
        w, rows = backend.eigh(gram)
    with stages("apply"):
        s, inverse = _roots(w)
        left = (q.to(_FP64) @ (rows.mT * s.sqrt()[:, None, :])).to(_FP32)
        right = ((inverse.sqrt()[:, :, None] * rows) @ h).to(_FP32)
        return Ordered(s, left.mT, right.mT) if transposed else Ordered(s, right, left)


def _spectral_transform(a: Tensor, b: Tensor, backend: Backend, stages: Stages) -> Ordered:
    """QR of both sides, SVD of the core (paper, sections B.2 and B.8)."""
    with stages("qr"):
        q_b, r_b = torch.linalg.qr(b)
        q_a, r_a = torch.linalg.qr(a.mT)
    with stages("svd_core"):
        u, s, vh = _square_svd(r_b.to(_FP64) @ r_a.to(_FP64).mT, backend)
    with stages("apply"):
        root = s.sqrt()
        left = q_b @ (u * root[:, None, :]).to(_FP32)
        right = (root[:, :, None] * vh).to(_FP32) @ q_a.mT
        return Ordered(s, right, left)


def _florist(a: Tensor, b: Tensor, backend: Backend, stages: Stages) -> Ordered:
    """SVD of both sides and of the core they leave, in FP64 (paper, sections B.2 and B.8)."""
    with stages("svd_factors"):
        u_b, s_b, vh_b = _tall_svd(b.to(_FP64), backend)
        v_a, s_a, uh_a = _tall_svd(a.to(_FP64).mT, backend)
    with stages("svd_core"):
        core = (s_b[:, :, None] * (vh_b @ uh_a.mT)) * s_a[:, None, :]
        u, s, vh = _square_svd(core, backend)
    with stages("apply"):
        root = s.sqrt()
        left = (u_b @ (u * root[:, None, :])).to(_FP32)
        right = ((root[:, :, None] * vh) @ v_a.mT).to(_FP32)
        return Ordered(s, right, left)


def _tall_svd(x: Tensor, backend: Backend) -> tuple[Tensor, Tensor, Tensor]:
    """U [m, d, r], s [m, r], V^T [m, r, r] of FP64 ``x`` [m, d, r]; columns of U without direction are zero."""
    w, rows = backend.eigh(x.mT @ x)
    s, inverse = _roots(w)
    return x @ (rows.mT * inverse[:, None, :]), s, rows


def _square_svd(core: Tensor, backend: Backend) -> tuple[Tensor, Tensor, Tensor]:
    """The same of FP64 ``core`` [m, r, r], where rows of V^T without direction are zero."""
    w, rows = backend.eigh(core @ core.mT)
    s, inverse = _roots(w)
    return rows.mT, s, (inverse[:, :, None] * rows) @ core


def _roots(w: Tensor) -> tuple[Tensor, Tensor]:
    """Roots of eigenvalues, descending, and their inverses; zero where they are rounding noise."""
    s = w.clamp_min(0.0).sqrt()
    live = s > s[:, :1] * _LEAST
    return s, torch.where(live, 1.0 / torch.where(live, s, 1.0), 0.0)


Recompress = Callable[[Tensor, Tensor, Backend, Stages], Ordered]
METHODS: dict[str, tuple[Recompress, int]] = {
    "fraq": (_fraq, MAX_BATCH),
    "fraq_batched": (_fraq, LARGE_BATCH),
    "spectral_transform": (partial(_pairwise, "spectral_transform"), 1),
    "spectral_transform_batched": (_spectral_transform, LARGE_BATCH),
    "florist": (partial(_pairwise, "florist"), 1),
    "florist_batched": (_florist, LARGE_BATCH),
}
