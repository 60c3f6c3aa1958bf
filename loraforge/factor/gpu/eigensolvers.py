"""The Jacobi kernel against the vendor's batched solver, by order: microseconds a matrix and accuracy."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor

from loraforge.factor.gpu.ops import Backend, Kernels
from loraforge.factor.gpu.timing import EventStages

ORDERS = (16, 32, 64, 128)
BATCH = 2048


def benchmark_eigensolvers(
    device: torch.device, *, warmups: int = 2, passes: int = 5, seed: int = 0
) -> list[dict[str, Any]]:
    """Records of both solvers on the same Gram matrices of :func:`gram_matrices`, passes in turn.

    ``residual``: the largest |G V - V W| over |G| (Frobenius) of a matrix; ``orthogonality``: the largest entry of
    |V^T V - I|. The library is left out where it is not found.
    """
    solvers: dict[str, Backend] = {"jacobi": Kernels(device, eigensolver="jacobi")}
    library = Kernels(device, eigensolver="library")
    if library.eigensolver == "syev_batched":
        solvers["library"] = library
    found = []
    for order in ORDERS:
        g = gram_matrices(BATCH, order, device, seed)
        seconds: dict[str, list[float]] = {name: [] for name in solvers}
        for number in range(warmups + passes):
            for name, solver in solvers.items():
                given, stages = g.clone(), EventStages()
                with stages("solve"):
                    solver.eigh(given)
                torch.cuda.synchronize(device)
                if number >= warmups:
                    seconds[name].append(stages.collect()["solve"])
        for name, solver in solvers.items():
            residual, orthogonality = accuracy(g, *solver.eigh(g.clone()))
            found.append(
                {
                    "record": "eigensolver",
                    "solver": name,
                    "order": order,
                    "batch": BATCH,
                    "us": statistics.median(seconds[name]) / BATCH * 1e6,
                    "passes": passes,
                    "residual": residual,
                    "orthogonality": orthogonality,
                }
            )
    return found


def gram_matrices(m: int, n: int, device: torch.device, seed: int) -> Tensor:
    """FP64 [m, n, n] = H H^T for H of n singular values that fall over three decades, as those of adapters do."""
    generator = torch.Generator(device=device).manual_seed(seed)
    h = torch.randn(m, n, 2 * n, dtype=torch.float64, device=device, generator=generator)
    h *= torch.logspace(0, -3, n, dtype=torch.float64, device=device)[None, :, None]
    return h @ h.mT


def accuracy(g: Tensor, w: Tensor, rows: Tensor) -> tuple[float, float]:
    """The largest residual and the largest departure from orthogonality of eigenpairs as ``Backend.eigh`` gives."""
    left = g @ rows.mT - rows.mT * w[:, None, :]
    norms = torch.linalg.matrix_norm(g)
    eye = torch.eye(g.shape[-1], dtype=g.dtype, device=g.device)
    return (
        float((torch.linalg.matrix_norm(left) / norms).max()),
        float((rows @ rows.mT - eye).abs().max()),
    )
