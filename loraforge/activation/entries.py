"""The ordered factors that a policy reads: in the norm that it measures, kept beside the factor cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from loraforge.activation.moments import Moments, stated_norm
from loraforge.allocate.policies import RULES
from loraforge.config import Policy
from loraforge.digest import source_digest
from loraforge.errors import InputError, UsageError
from loraforge.export.directions import CachedFleet, Source, cached_source
from loraforge.factor.cache import CachedAdapter, cache_key, find, store
from loraforge.factor.engine import Method, ModuleFactors, acceptance_probes
from loraforge.factor.fleet import factorise_fleet, hash_weights
from loraforge.files import canonical_json, sha256_text
from loraforge.fleet.peft_io import Adapter
from loraforge.progress import progress

_COLLECT = {
    "activations": "collect them with `loraforge moments` and name the file",
    "fisher": "collect them with `loraforge moments --adapters` and name the file",
}
_MAX_ACTION_ERROR = 1e-4  # of whole ordered factors against the original update


def require_moments(policy: Policy, given: object | None) -> None:
    """Raise UsageError unless moments of the norm that ``policy`` measures in are given, and only there."""
    norm = RULES[policy].norm
    if norm == "weights":
        if given is not None:
            raise UsageError(
                f"the {policy} policy measures weights alone",
                key="--moments",
                remedy="leave it out, or choose an activation or a fisher policy",
            )
        return
    what = "activations" if norm == "activations" else "the Fisher information"
    if given is None:
        raise UsageError(f"the {policy} policy measures {what}", key="--moments", remedy=_COLLECT[norm])
    stated = stated_norm(given) if isinstance(given, Path) else None
    if stated not in (None, norm):
        raise UsageError(
            f"the {policy} policy measures {what}, and {given} is for {stated} policies",
            key="--moments",
            remedy=_COLLECT[norm],
        )


def entries_of(
    fleet: Sequence[Adapter], cache: Path, *, moments: Moments | None = None, method: Method = "auto"
) -> list[CachedAdapter]:
    """Cache entries of ``fleet``: ordered in the norm of ``moments`` where there are, by weights otherwise."""
    if moments is None:
        return factorise_fleet(fleet, cache, method=method)
    return order_fleet(fleet, cache, moments)


def entry_key(adapter: Adapter, *, moments: Moments | None = None, method: Method = "auto") -> str:
    """The name of an adapter's entry."""
    return cache_key(adapter, method) if moments is None else ordered_key(adapter, moments)


def source_of(
    fleet: Sequence[Adapter],
    entries: Sequence[CachedAdapter],
    *,
    moments: Moments | None = None,
    method: Method = "auto",
) -> Source:
    """What export reads of ``entries``; a GPU makes plain ones anew, those in another norm are taken as they are."""
    return cached_source(fleet, entries, method=method) if moments is None else CachedFleet(fleet, entries)


def ordered_key(adapter: Adapter, moments: Moments) -> str:
    """Hex SHA-256 of all that an entry in another norm depends on: weights, scales, moments and source."""
    return sha256_text(
        canonical_json(
            {
                "weights": adapter.weights_sha256,
                "scales": {module.name: module.scale for module in adapter.modules},
                "moments": moments.sha256,
                "settings": moments.settings,
                "source": source_digest("activation", "factor/evd.py"),
            }
        )
    )


def order_fleet(fleet: Sequence[Adapter], cache: Path, moments: Moments) -> list[CachedAdapter]:
    """Entries of every adapter ordered in the norm of ``moments``, in the fleet's order; missing ones are made.

    Raises InputError for a module that ``moments`` does not have, or has in another size, and IntegrityError where
    they are those of other weights.
    """
    hash_weights(fleet)
    for adapter in fleet:
        moments.require(adapter)
    paths = [Path(cache) / "activation" / f"{ordered_key(adapter, moments)}.safetensors" for adapter in fleet]
    found = [find(adapter, path) for adapter, path in zip(fleet, paths, strict=True)]
    missing = {
        path: adapter for adapter, path, entry in zip(fleet, paths, found, strict=True) if entry is None
    }
    made: dict[Path, CachedAdapter] = {}
    if missing:
        with progress(f"order by {moments.norm}", len(missing)) as ticker:
            for path, adapter in missing.items():
                made[path] = store(adapter, path, _order(adapter, moments))
                ticker.advance(adapter.name)
    return [
        entry or CachedAdapter(adapter.name, path, made[path].modules)
        for adapter, path, entry in zip(fleet, paths, found, strict=True)
    ]


def _order(adapter: Adapter, moments: Moments) -> dict[str, ModuleFactors]:
    found: dict[str, ModuleFactors] = {}
    with adapter.reader() as reader:
        for module in adapter.modules:
            a, b = reader.factors(module)
            s, new_a, new_b = moments.ordered(adapter, module, a, b)
            new_a, new_b = new_a.float(), new_b.float()
            error = _action_error(module.scale, (a, b), (new_a, new_b))
            if not error < _MAX_ACTION_ERROR:
                raise InputError(
                    f"cannot be ordered by {moments.norm} (action error {error:.1e})",
                    path=adapter.path,
                    key=module.name,
                )
            found[module.name] = ModuleFactors(s, new_a, new_b, moments.factors_path, error, 0.0)
    return found


def _action_error(scale: float, original: tuple[Tensor, Tensor], ordered: tuple[Tensor, Tensor]) -> float:
    """|B' A' P - s B A P|_F / |s B A P|_F over the acceptance probes P; the plain difference for a zero update."""
    a, b = original
    new_a, new_b = ordered
    probes = acceptance_probes(a.shape[1])
    wanted = scale * (b.double() @ (a.double() @ probes))
    difference = float(torch.linalg.norm(new_b.double() @ (new_a.double() @ probes) - wanted))
    norm = float(torch.linalg.norm(wanted))
    return difference / norm if norm > 0 else difference
