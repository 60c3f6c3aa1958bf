"""Error certificates of exported factors, in FP64 and without a dense update."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

PROBES = 8
PROBE_SEED = 20261130


@lru_cache(maxsize=64)
def probes(d_in: int) -> torch.Tensor:
    """The eight Gaussian probes [d_in, 8] (float64) of every module with ``d_in`` inputs."""
    return torch.randn(
        d_in, PROBES, dtype=torch.float64, generator=torch.Generator().manual_seed(PROBE_SEED + d_in)
    )


def leading_right_directions(a: torch.Tensor) -> torch.Tensor:
    """Orthonormal rows [k, d_in] (float64) of ordered A = S^1/2 V^T [k, d_in]; a zero row stays zero."""
    rows = a.double()
    norms = rows.norm(dim=1, keepdim=True)
    return torch.where(norms > 0, rows / norms.clamp_min(torch.finfo(torch.float64).tiny), 0.0)


def action_error(
    original: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    ordered_a: torch.Tensor,
    exported: tuple[torch.Tensor, torch.Tensor],
) -> float:
    """|W x - R x|_F / |R x|_F over the probes x; 0 where both are zero.

    R = s B A V_k V_k^T is the rank-k truncation of the original update, taken from the original factors: it
    shares only the leading right singular directions with what is certified, neither their singular values nor
    the left factor, nor the rounding of the export.

    Parameters
    ----------
    original: A [r, d_in] and B [d_out, r] as trained.
    scale: s of the original.
    ordered_a: A = S^1/2 V^T [k, d_in] of the factor cache.
    exported: A [k, d_in] and B [d_out, k] as written.
    """
    a, b, x, found = _on_probes(original, exported)
    directions = leading_right_directions(ordered_a)
    wanted = scale * (b @ (a @ (directions.T @ (directions @ x))))
    return relative_error(found, wanted)


def output_action_error(
    original: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    ordered_b: torch.Tensor,
    exported: tuple[torch.Tensor, torch.Tensor],
) -> float:
    """:func:`action_error` of factors ordered by their outputs: R = U_k U_k^T s B A.

    Parameters
    ----------
    ordered_b: B = U g [d_out, k] with orthogonal columns, as :mod:`loraforge.activation.whitened` makes it.
    """
    a, b, x, found = _on_probes(original, exported)
    directions = leading_right_directions(ordered_b.mT)
    wanted = scale * (directions.mT @ ((directions @ b) @ (a @ x)))
    return relative_error(found, wanted)


def oblique_action_error(
    original: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    ordered_a: torch.Tensor,
    exported: tuple[torch.Tensor, torch.Tensor],
) -> float:
    """:func:`action_error` of factors that are orthogonal on neither side: R = s B A (A'^+)_k A'_k.

    Parameters
    ----------
    ordered_a: all rows A' [r, d_in], linearly independent, as :mod:`loraforge.activation.fisher` makes them. With
        A'^+ their pseudo-inverse, s B A A'^+ is B', whose k first columns are taken from the original factors so.
    """
    a, b, x, found = _on_probes(original, exported)
    rows = leading_right_directions(ordered_a)
    q, r = torch.linalg.qr(rows.mT)
    kept = torch.arange(len(rows)) < len(exported[0])
    coordinates = torch.linalg.solve_triangular(r.mT, (rows @ x) * kept[:, None], upper=False)
    return relative_error(found, scale * (b @ (a @ (q @ coordinates))))


def _on_probes(
    original: tuple[torch.Tensor, torch.Tensor], exported: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The original factors in FP64, the probes x, and what the exported factors make of them: A, B, x, W x."""
    a, b = (factor.double() for factor in original)
    out_a, out_b = (factor.double() for factor in exported)
    x = probes(a.shape[1])
    return a, b, x, out_b @ (out_a @ x)


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """|found - wanted|_F / |wanted|_F; 0 for 0/0."""
    difference, norm = float(torch.linalg.norm(found - wanted)), float(torch.linalg.norm(wanted))
    if norm == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / norm


def energy_splits(spectra: Sequence[NDArray[np.float64]], ks: Sequence[int]) -> list[tuple[float, float]]:
    """Of each spectrum (descending), the share of its squares in the ``k`` first, and |dW - dW_k|_F / |dW|_F; (1, 0)
    for a zero update.

    Both are summed from their own terms: sqrt(1 - share) loses half the digits where little is lost.
    """
    energy = np.zeros((len(spectra), max(map(len, spectra), default=0)))
    for row, sigma in zip(energy, spectra, strict=True):
        row[: len(sigma)] = sigma
    np.square(energy, out=energy)
    kept = np.arange(energy.shape[1]) < np.asarray(ks, dtype=np.int64)[:, None]
    total = energy.sum(axis=1)
    whole = np.where(total > 0.0, total, 1.0)
    share = np.where(total > 0.0, np.minimum(1.0, np.where(kept, energy, 0.0).sum(axis=1) / whole), 1.0)
    lost = np.sqrt(np.minimum(1.0, np.where(kept, 0.0, energy).sum(axis=1) / whole))
    return list(zip(share.tolist(), lost.tolist(), strict=True))
