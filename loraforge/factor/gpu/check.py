"""Acceptance on the device: every matrix, in FP64, by products that none of the paths has made."""

from __future__ import annotations

import torch
from torch import Tensor

from loraforge.factor.batch import Batch, Ordered
from loraforge.factor.engine import acceptance_probes, action_errors, relative, spectrum_errors
from loraforge.factor.gpu.engine import Group, GroupFactors
from loraforge.factor.gpu.ops import Backend

CHUNK_BYTES = 4 << 30


def root_spectrum(batch: Batch, backend: Backend) -> Tensor:
    """Singular values [m, r] of the updates, descending: roots of the eigenvalues of Q^1/2 P Q^1/2.

    P = X^T X and Q = Y Y^T are torch's FP64 products and Q^1/2 comes from an EVD, so that neither the kernels
    nor a Cholesky or QR factor of a path under test is behind them, and any rank will do. Good to
    ``sqrt(eps) |X| |Y|``; :func:`loraforge.factor.reference.reference_spectrum` is better, and needs the CPU.
    """
    p, q = batch.x.mT @ batch.x, batch.y @ batch.y.mT
    w, rows = backend.eigh(q)
    root = rows.mT @ (w.clamp_min(0.0).sqrt()[:, :, None] * rows)
    values, _ = backend.eigh((root @ p @ root).contiguous())
    return values.clamp_min(0.0).sqrt() * batch.gain[:, None]


def group_errors(group: Group, result: GroupFactors, backend: Backend) -> tuple[Tensor, Tensor]:
    """Action and spectrum errors [m] of full ordered factors, as :mod:`loraforge.factor.engine` defines them, with
    :func:`root_spectrum` for the reference; on the CPU."""
    (part,) = result.parts
    return ordered_errors(group, Ordered(result.s, part.a, part.b), backend)


def ordered_errors(group: Group, ordered: Ordered, backend: Backend) -> tuple[Tensor, Tensor]:
    """As :func:`group_errors`, for the result of a baseline."""
    action, spectrum = [], []
    for rows in chunks(group):
        batch = Batch.of(group.a[rows], group.b[rows], group.scale[rows])
        piece = Ordered(ordered.s[rows], ordered.a[rows], ordered.b[rows])
        action.append(action_errors(batch, piece))
        spectrum.append(spectrum_errors(root_spectrum(batch, backend), piece.s))
    return (
        (torch.cat(action).cpu(), torch.cat(spectrum).cpu()) if action else (torch.empty(0), torch.empty(0))
    )


def prefix_errors(full: GroupFactors, deferred: GroupFactors, d_in: int) -> Tensor:
    """Relative action difference [m], over eight probes together, of deferred factors from the same prefixes of full
    ones, at the widths that were built; on the CPU."""
    (whole,) = full.parts
    probes = acceptance_probes(d_in).to(whole.a.device)
    found = []
    for part in deferred.parts:
        k = part.a.shape[1]
        for start in range(part.start, part.stop, 256):
            rows = slice(start, min(part.stop, start + 256))
            mine = slice(rows.start - part.start, rows.stop - part.start)
            wanted = whole.b[rows, :, :k].double() @ (whole.a[rows, :k].double() @ probes)
            got = part.b[mine].double() @ (part.a[mine].double() @ probes)
            difference = torch.linalg.vector_norm(got - wanted, dim=(1, 2))
            found.append(relative(difference, torch.linalg.vector_norm(wanted, dim=(1, 2))))
    return torch.cat(found).cpu() if found else torch.empty(0)


def chunks(group: Group) -> list[slice]:
    """Rows whose FP64 copies stay within ``CHUNK_BYTES``."""
    d_in, d_out, rank = group.key
    size = max(1, CHUNK_BYTES // (8 * 3 * rank * (d_in + d_out)))
    return [slice(start, min(len(group), start + size)) for start in range(0, len(group), size)]
