"""Householder TSQR, the path for ill-conditioned and rank-deficient factors (paper, sections 4.3 and A.1).

    X = Q R  (FP32, a tree over row tiles);  H = R Y;  G = H H^T = V S^2 V^T  (FP64)
    X' = Q (V S^1/2);  Y' = S^-1/2 V^T H

Q is never formed: the orthogonal factors of the leaves and merges are kept, and applied once from the root of
the tree to its leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loraforge.factor.batch import Batch, Ordered, normalise
from loraforge.factor.evd import eigh_descending, ordered_rows
from loraforge.factor.stages import Stages

# LAPACK blocks a panel by itself: at 576 rows, tiles of 64 to 288 rows took 1.1 to 2.7 times as long as one.
TILE_ROWS = 1024


@dataclass(frozen=True)
class TsqrTree:
    """The factorisation of x [m, d, r]: ``r`` [m, r, r], and the orthogonal factors of every level.

    ``leaves`` [m, tiles, rows, r]; ``merges[i]`` [m, pairs, 2 r, r], lowest level first. A level with an odd
    number of nodes carries the last one up unchanged.
    """

    r: Tensor
    leaves: Tensor
    merges: tuple[Tensor, ...]
    rows: int

    def apply(self, c: Tensor) -> Tensor:
        """Q @ c for ``c`` [m, r, k]: [m, d, k]."""
        rank = self.r.shape[-1]
        nodes = c[:, None]
        for merge in reversed(self.merges):
            pairs = merge.shape[1]
            split = (merge @ nodes[:, :pairs]).reshape(nodes.shape[0], 2 * pairs, rank, -1)
            nodes = torch.cat([split, nodes[:, pairs:]], dim=1)
        return (self.leaves @ nodes).flatten(1, 2)[:, : self.rows]


def tsqr(x: Tensor, tile_rows: int = TILE_ROWS) -> TsqrTree:
    """Factorise ``x`` [m, d, r], d >= r, in its own precision with tiles of at most ``tile_rows`` >= r rows."""
    m, rows, rank = x.shape
    tiles = -(-rows // max(tile_rows, rank))
    height = max(-(-rows // tiles), rank)
    padding = tiles * height - rows
    padded = torch.nn.functional.pad(x, (0, 0, 0, padding)) if padding else x
    leaves, nodes = torch.linalg.qr(padded.reshape(m, tiles, height, rank))
    merges: list[Tensor] = []
    while nodes.shape[1] > 1:
        pairs = nodes.shape[1] // 2
        merge, merged = torch.linalg.qr(nodes[:, : 2 * pairs].reshape(m, pairs, 2 * rank, rank))
        merges.append(merge)
        nodes = torch.cat([merged, nodes[:, 2 * pairs :]], dim=1)
    return TsqrTree(nodes[:, 0], leaves, tuple(merges), rows)


def tsqr_factors(batch: Batch, stages: Stages, *, tile_rows: int = TILE_ROWS) -> Ordered:
    """Ordered factors of every update of ``batch``; works for any rank and any conditioning."""
    with stages("qr"):
        x, exponent = normalise(batch.x)  # FP32 does not hold the square of every FP32 number
        tree = tsqr(x.to(torch.float32), tile_rows)
    with stages("gram"):
        r = torch.ldexp(tree.r.to(torch.float64), exponent[:, None, None])
        h = r @ batch.y
        core = h @ h.mT
    with stages("evd"):
        _, vectors = eigh_descending(core)
    with stages("apply"):
        s, vectors, z = ordered_rows(vectors, r, batch.y)
        s, root, inverse = batch.roots(s)
        # the gain goes in after the FP32 product, so that only its result has to fit
        x = tree.apply(vectors.to(torch.float32)) * root.to(torch.float32)[:, None, :]
        return batch.ordered(s, x, z.mul_(inverse[:, :, None]))
