"""Ordered factors in the norm of the Fisher information: what a truncation does to an adapter's own answers.

To second order, the Kullback-Leibler divergence of a changed adapter's answers from its own is half the Fisher norm
of the change. An update dW = s B A and all its truncations lie in the span of Q_B and Q_A, with B = Q_B R_B and
A^T = Q_A R_A, so that r x r cores are all that is needed of a module:

    S = s R_B R_A^T (the update),   D = Q_B^T (d log p / d W) Q_A (the gradient),   F = E[vec D vec D^T]

with p the adapter's own distribution over answers. As Shampoo and K-FAC do, F is taken for a Kronecker product,
F ~ P_out (x) P_in / t with P_out = E[D D^T], P_in = E[D^T D] and t their trace. Each is mixed with its mean diagonal,
P = (1 - damping) P + damping tr(P) / r I, and with P_out = L L^T, P_in / t = M M^T (Cholesky), in FP64:

    L^T S M = U diag(sigma) V^T;   B' = Q_B L^-T U diag(sigma) g^-1,   A' = g V^T M^-1 Q_A^T

By Eckart and Young the first k directions minimise tr(P_out (S - S_k) P_in (S - S_k)^T) / t among all updates of
rank k, and the sum of the squares of the lost sigma is twice the divergence, in nats an answer: one unit for all
modules and all adapters. g gives both factors rows and columns of equal length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loraforge.activation.moments import REMEDY, Moments
from loraforge.errors import InputError, IntegrityError
from loraforge.fleet.peft_io import Adapter, LoraModule

# Share of the mean diagonal that every direction of a core is given: a few dozen answers do not excite them all.
DAMPING = 0.1


@dataclass(frozen=True)
class FisherMoments(Moments):
    """P_out and P_in of every module of every adapter of a fleet.

    Parameters
    ----------
    adapters: of each adapter by name, the digest of its weights and the scales of its modules.
    """

    adapters: Mapping[str, Mapping[str, Any]]

    schema = "loraforge.fisher/1"
    norm = "fisher"
    factors_path = "fisher"

    @classmethod
    def of(cls, path: Path, header: Mapping[str, Any]) -> FisherMoments:
        return cls(path, header["tensors_sha256"], header["base"], header["tokens"], header["adapters"])

    @property
    def settings(self) -> dict[str, Any]:
        return {"damping": DAMPING}

    def require(self, adapter: Adapter) -> None:
        known = self.adapters.get(adapter.name)
        if known is None:
            raise InputError("no moments of this adapter", path=self.path, key=adapter.name, remedy=REMEDY)
        if known != identity(adapter):
            raise IntegrityError(
                "its moments were collected with other weights or scales",
                path=adapter.path,
                key=adapter.name,
                remedy=REMEDY,
            )

    def tensors(self) -> dict[str, Tensor]:
        """All matrices as they are stored, by name."""
        return {key: self._handle.get_tensor(key) for key in self._handle.keys()}  # noqa: SIM118 (no mapping)

    def ordered(
        self, adapter: Adapter, module: LoraModule, a: Tensor, b: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        label = f"{adapter.name}: {module.name}"
        p_out, p_in = (
            self.symmetric(key, module.rank, module=label) for key in core_keys(adapter.name, module.name)
        )
        return fisher_factors(a, b, module.scale, p_out, p_in)


def core_keys(adapter: str, module: str) -> tuple[str, str]:
    """Names of the tensors of P_out and P_in."""
    return f"{adapter}/{module}.out", f"{adapter}/{module}.in"


def identity(adapter: Adapter) -> dict[str, Any]:
    """What the moments of an adapter belong to: its weights and the scale of each module."""
    return {
        "weights": adapter.weights_sha256,
        "scales": {module.name: module.scale for module in adapter.modules},
    }


def orthonormal(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Q [d, r] and R [r, r], float64, of ``matrix`` [d, r], with the diagonal of R not negative.

    That makes them unique for full column rank, so that cores mean the same wherever they were computed.
    """
    q, r = torch.linalg.qr(matrix.double())
    sign = torch.where(r.diagonal() < 0, -1.0, 1.0).double()
    return q * sign, r * sign[:, None]


def fisher_factors(
    a: Tensor, b: Tensor, scale: float, p_out: Tensor, p_in: Tensor, damping: float = DAMPING
) -> tuple[Tensor, Tensor, Tensor]:
    """Ordered factors of ``scale * b @ a`` in the norm of the Fisher information.

    Parameters
    ----------
    a, b: [r, d_in] and [d_out, r], any float type, r <= d_in and r <= d_out.
    p_out, p_in: E[D D^T] and E[D^T D], float64 [r, r], symmetric, not negative, of one trace.

    Returns sigma [r] (descending), A' [r, d_in] and B' [d_out, r], float64; B' A' is the whole update. Where no answer
    depends on the module, sigma is zero and the order is that of the weights.
    """
    q_b, r_b = orthonormal(b)
    q_a, r_a = orthonormal(a.mT)
    core = scale * r_b @ r_a.mT
    trace = float(p_out.trace())
    unit = torch.eye(len(core), dtype=torch.float64)
    outer, inner = unit, unit
    if trace > 0:
        outer = torch.linalg.cholesky(damped(p_out, damping))
        inner = torch.linalg.cholesky(damped(p_in, damping) / trace)
    u, sigma, vt = torch.linalg.svd(outer.mT @ core @ inner)
    columns = torch.linalg.solve_triangular(outer.mT, u * sigma, upper=True)
    rows = torch.linalg.solve_triangular(inner.mT, vt.mT, upper=True).mT
    gain = (torch.linalg.vector_norm(columns, dim=0) / torch.linalg.vector_norm(rows, dim=1)).sqrt()
    gain = torch.where(gain > 0, gain, 1.0)
    return (
        sigma if trace > 0 else torch.zeros_like(sigma),
        gain[:, None] * rows @ q_a.mT,
        q_b @ columns / gain,
    )


def damped(matrix: Tensor, share: float) -> Tensor:
    """``(1 - share) P + share tr(P) / r I``, float64 [r, r]."""
    return (1 - share) * matrix + share * matrix.trace() / len(matrix) * torch.eye(
        len(matrix), dtype=matrix.dtype
    )
