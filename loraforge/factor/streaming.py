"""The factor stage of a fleet of any length: adapters are opened, hashed and factorised in groups, and let go.

What stays in memory is the cache's metadata and spectra, some 25 kB an adapter of 252 modules and a few directions;
:func:`loraforge.factor.fleet.factorise_fleet` keeps every adapter open, ten times that. Where only spectra are asked
for, adapters whose files have not changed since they were last read are not opened at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from loraforge.config import Keep
from loraforge.factor.cache import (
    CachedAdapter,
    content_digest,
    entry_path,
    find_spectra,
    key_of,
)
from loraforge.factor.engine import Method
from loraforge.factor.fleet import build, check_method, complete, divide
from loraforge.factor.known import Content, Known
from loraforge.factor.stages import Stages
from loraforge.fleet.options import DEFAULT, ReadOptions
from loraforge.fleet.parts import WHOLE, Part
from loraforge.fleet.peft_io import Adapter, Member, check_members
from loraforge.fleet.source import Place, places
from loraforge.garbage import uncollected
from loraforge.progress import Ticker, progress

GROUP = 64  # adapters in memory together: on a GPU they share launches


@dataclass(frozen=True)
class Streamed:
    """Cache entries in the fleet's order, and what they took: adapters that were read, and factorised."""

    entries: list[CachedAdapter]
    read: int
    factorised: int


@dataclass(frozen=True)
class _Unread:
    """An adapter that must be read: its number in the fleet, where it lies, and its identity before that."""

    number: int
    place: Place
    identity: str | None


def stream_source(
    source: Sequence[Path],
    cache: Path,
    *,
    need: Keep = "factors",
    keep: Keep = "factors",
    part: Part = WHOLE,
    method: Method = "auto",
    workers: int | None = None,
    devices: Sequence[str] = (),
    options: ReadOptions = DEFAULT,
) -> Streamed:
    """Entries of a lock's adapters, or of those in folders, or of a part of them; missing ones are built.

    ``need``: what an entry must have; with ``spectra``, factors are not looked at. ``keep``: what is kept of entries
    that are built. Every adapter is opened once before anything is built, so that a bad one is refused early, and every
    finished one stays: an interrupted run resumes. Raises what :func:`loraforge.fleet.source.places`,
    :func:`loraforge.fleet.peft_io.open_adapter` and :func:`loraforge.factor.fleet.factorise_fleet` raise.
    """
    check_method(method)
    known = Known(cache)
    with uncollected():
        fleet = places(source, part)
        found, unread = _survey(fleet, cache, known, need, method, options)
        factorised = 0
        # processes on several devices start once
        size = len(unread) if len(devices) > 1 else GROUP
        with ExitStack() as stack:
            ticker: Ticker | None = None  # shown once there is something to build
            for start in range(0, len(unread), size):
                group = unread[start : start + size]
                adapters = [work.place.open(options) for work in group]
                missing, entries = divide(adapters, cache, method, Stages(), need)
                built: list[CachedAdapter] = []
                if missing:
                    ticker = ticker or stack.enter_context(progress("factor", len(unread) - start))
                    built = build(
                        missing, method, Stages(), ticker, workers=workers, devices=devices, keep=keep
                    )
                    factorised += len(built)
                if ticker is not None and len(built) < len(group):
                    ticker.advance(step=len(group) - len(built))
                for work, entry in zip(group, complete(adapters, entries, built), strict=True):
                    found[work.number] = entry
                for work, adapter in zip(group, adapters, strict=True):
                    _remember(known, work, adapter)
        return Streamed([found[number] for number in range(len(fleet))], len(unread), factorised)


def _survey(
    fleet: Sequence[Place], cache: Path, known: Known, need: Keep, method: Method, options: ReadOptions
) -> tuple[dict[int, CachedAdapter], list[_Unread]]:
    """Entries by number of adapters that need not be read, and the others, opened and checked but not hashed."""
    found: dict[int, CachedAdapter] = {}
    unread: list[_Unread] = []
    members: list[Member] = []
    for number, place in enumerate(fleet):
        identity = known.identity(place)
        content = known.recall(identity) if identity is not None and need == "spectra" else None
        entry = None
        if content is not None and (place.base is None or place.base.name == content.base_model):
            entry = find_spectra(place.name, entry_path(key_of(content.content, method), cache))
        if content is not None and entry is not None:
            found[number] = entry
            base_model = content.base_model
        else:
            unread.append(_Unread(number, place, identity))
            base_model = place.open(options).base_model
        members.append(Member(place.name, base_model, place.folder))
    check_members(members)
    return found, unread


def _remember(known: Known, work: _Unread, adapter: Adapter) -> None:
    """Remember what was read, unless it has changed meanwhile, or depends on more than its own files."""
    plain = adapter.weights.mapped and not adapter.derivation
    if plain and work.identity is not None and known.identity(work.place) == work.identity:
        known.remember(work.identity, Content(content_digest(adapter), adapter.base_model))
