"""Ordered factors in the norm of activations, kept beside the factor cache and read as it is.

The best rank-k update in |(dW - dW_k) C^1/2|_F is U_k U_k^T dW with U_k the leading left singular vectors of
dW C^1/2: no root and no inverse of C is needed, and C may be singular. From factors, per module, in FP64:

    B = Q R;   G = s^2 R (A C A^T) R^T = V diag(sigma^2) V^T;   B' = Q V g,   A' = g^-1 s V^T R A

sigma are the singular values of dW C^1/2, g gives both factors rows and columns of equal length, and a prefix of k
directions is the optimum of rank k, as in the factor cache. Nothing is larger than r x d.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from loraforge.activation.moments import Moments
from loraforge.digest import source_digest
from loraforge.errors import InputError
from loraforge.factor.cache import CachedAdapter, find, store
from loraforge.factor.engine import ModuleFactors, acceptance_probes
from loraforge.factor.evd import eigh_descending
from loraforge.factor.fleet import hash_weights
from loraforge.files import canonical_json, sha256_text
from loraforge.fleet.peft_io import Adapter
from loraforge.progress import progress

# Share of the mean second moment that every input is given. What calibration texts never excite is not free to lose:
# an adapter meets other inputs than the base does over them, not least its own.
SHRINKAGE = 0.5


def whitened_key(adapter: Adapter, moments: Moments) -> str:
    """Hex SHA-256 of all that an entry depends on: weights, scales, moments and source."""
    return sha256_text(
        canonical_json(
            {
                "weights": adapter.weights_sha256,
                "scales": {module.name: module.scale for module in adapter.modules},
                "moments": moments.sha256,
                "shrinkage": SHRINKAGE,
                "source": source_digest("activation", "factor/evd.py"),
            }
        )
    )


def whiten_fleet(fleet: Sequence[Adapter], cache: Path, moments: Moments) -> list[CachedAdapter]:
    """Entries of every adapter ordered by what it does to activations, in the fleet's order; missing ones are made.

    Raises InputError for a module whose inputs ``moments`` does not have, or has in another size.
    """
    hash_weights(fleet)
    paths = [
        Path(cache) / "activation" / f"{whitened_key(adapter, moments)}.safetensors" for adapter in fleet
    ]
    found = [find(adapter, path) for adapter, path in zip(fleet, paths, strict=True)]
    missing = {
        path: adapter for adapter, path, entry in zip(fleet, paths, found, strict=True) if entry is None
    }
    made: dict[Path, CachedAdapter] = {}
    if missing:
        with progress("whiten", len(missing)) as ticker:
            for path, adapter in missing.items():
                made[path] = store(adapter, path, _whiten(adapter, moments))
                ticker.advance(adapter.name)
    return [
        entry or CachedAdapter(adapter.name, path, made[path].modules)
        for adapter, path, entry in zip(fleet, paths, found, strict=True)
    ]


def _whiten(adapter: Adapter, moments: Moments) -> dict[str, ModuleFactors]:
    found: dict[str, ModuleFactors] = {}
    with adapter.reader() as reader:
        for module in adapter.modules:
            a, b = reader.factors(module)
            second = shrunk(moments.second_moment(module.name, module.d_in))
            s, new_a, new_b = whitened_factors(a, b, module.scale, second)
            new_a, new_b = new_a.float(), new_b.float()
            probes = acceptance_probes(module.d_in)
            wanted = module.scale * (b.double() @ (a.double() @ probes))
            difference = torch.linalg.norm(new_b.double() @ (new_a.double() @ probes) - wanted)
            norm = float(torch.linalg.norm(wanted))
            error = float(difference) / norm if norm > 0 else float(difference)
            if not error < 1e-4:
                raise InputError(
                    f"cannot be ordered by activations (action error {error:.1e})",
                    path=adapter.path,
                    key=module.name,
                )
            found[module.name] = ModuleFactors(s, new_a, new_b, "whitened", error, 0.0)
    return found


def shrunk(second: Tensor, share: float = SHRINKAGE) -> Tensor:
    """``(1 - share) C + share tr(C) / d I``, float64 [d, d]."""
    d = len(second)
    return (1 - share) * second + share * second.trace() / d * torch.eye(d, dtype=second.dtype)


def whitened_factors(a: Tensor, b: Tensor, scale: float, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ordered factors of ``scale * b @ a`` in the norm of ``second``.

    Parameters
    ----------
    a, b: [r, d_in] and [d_out, r], any float type. second: C, float64 [d_in, d_in], symmetric, not negative.

    Returns sigma [r] (descending, of dW C^1/2), A' [r, d_in] and B' [d_out, r], float64; B' A' is the whole update.
    """
    a, b = a.double(), b.double()
    q, upper = torch.linalg.qr(b)
    moved = scale * (upper @ a)
    values, vectors = eigh_descending(moved @ second @ moved.mT)
    rows = vectors.mT @ moved
    length = torch.linalg.vector_norm(rows, dim=1)
    gain = torch.where(length > 0, length, 1.0).sqrt()
    return values.sqrt(), rows / gain[:, None], (q @ vectors) * gain
