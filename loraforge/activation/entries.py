"""The ordered factors that a policy reads: in the norm that it measures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loraforge.activation.moments import Moments
from loraforge.activation.whitened import whiten_fleet, whitened_key
from loraforge.allocate.policies import RULES
from loraforge.config import Policy
from loraforge.errors import UsageError
from loraforge.export.directions import CachedFleet, Source, cached_source
from loraforge.factor.cache import CachedAdapter, cache_key
from loraforge.factor.engine import Method
from loraforge.factor.fleet import factorise_fleet
from loraforge.fleet.peft_io import Adapter


def require_moments(policy: Policy, given: object | None) -> None:
    """Raise UsageError unless moments are given where ``policy`` measures activations, and only there."""
    needed = RULES[policy].norm == "activations"
    if needed and given is None:
        raise UsageError(
            f"the {policy} policy measures activations",
            key="--moments",
            remedy="collect them with `loraforge moments` and name the file",
        )
    if given is not None and not needed:
        raise UsageError(
            f"the {policy} policy measures weights alone",
            key="--moments",
            remedy="leave it out, or choose an activation policy",
        )


def entries_of(
    fleet: Sequence[Adapter], cache: Path, *, moments: Moments | None = None, method: Method = "auto"
) -> list[CachedAdapter]:
    """Cache entries of ``fleet``: ordered by activations where there are ``moments``, by weights otherwise."""
    if moments is None:
        return factorise_fleet(fleet, cache, method=method)
    return whiten_fleet(fleet, cache, moments)


def entry_key(adapter: Adapter, *, moments: Moments | None = None, method: Method = "auto") -> str:
    """The name of an adapter's entry."""
    return cache_key(adapter, method) if moments is None else whitened_key(adapter, moments)


def source_of(
    fleet: Sequence[Adapter],
    entries: Sequence[CachedAdapter],
    *,
    moments: Moments | None = None,
    method: Method = "auto",
) -> Source:
    """What export reads of ``entries``; a GPU makes plain ones anew, those in another norm are taken as they are."""
    return cached_source(fleet, entries, method=method) if moments is None else CachedFleet(fleet, entries)
