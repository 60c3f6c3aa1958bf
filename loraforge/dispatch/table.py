"""Dispatch tables: device x phase x projection shape x token, adapter and rank bucket -> a choice of kernels.

What the host knows when a graph is captured is looked up here, once a shape; what varies afterwards (the ranks of the
slots in a batch) the kernels branch on themselves. A table is one JSON file and never changes in use: its ``sha256`` is
over its content, and every record of a benchmark states it.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from loraforge.errors import InputError, IntegrityError, LoraForgeError
from loraforge.files import canonical_json, read_json, sha256_text, write_json
from loraforge.ops.choice import Choice

Phase = Literal["decode", "prefill"]
FOLDER = Path(__file__).resolve().parent / "tables"
GENERIC = "generic"
EVEN = 2.0
_MADE_BY = "loraforge bench tune, or tune-steps for one of steps"
SCHEMA: Literal["loraforge.dispatch/1"] = "loraforge.dispatch/1"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Entry(_Record):
    """One cell: ``choice`` serves up to ``tokens`` tokens of up to ``adapters`` adapters (None: of any number), whose
    live ranks have a mean of up to ``rank``; where it is for ``even`` ranks, only those up to EVEN times their mean.

    d_in, channels: the projection's input width, and the output channels of each slice.
    pair: the separate shrink and expand that are the fastest each by itself, for callers that need Z between them (a
        reduction over tensor-parallel ranks).
    speedup: of the choice over what it was tuned against, the best native path or another table's choice, for the
        reader.
    """

    phase: Phase
    d_in: int = Field(ge=1)
    channels: tuple[int, ...] = Field(min_length=1, max_length=3)
    tokens: int = Field(ge=1)
    adapters: int | None = Field(default=None, ge=1)
    even: bool = False
    rank: int = Field(ge=1)
    choice: dict[str, Any]
    pair: dict[str, Any]
    speedup: float | None = Field(default=None, gt=0)

    @field_validator("choice", "pair")
    @classmethod
    def _names_kernels(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            Choice.from_json(value)
        except (LoraForgeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"names no kernel ({error})") from error
        return value

    @model_validator(mode="after")
    def _pair_is_two(self) -> Entry:
        pair = Choice.from_json(self.pair)
        if pair.expand is None and not pair.native:
            raise ValueError("pair is one kernel for both products")
        return self

    @property
    def shape(self) -> tuple[Phase, int, tuple[int, ...]]:
        return self.phase, self.d_in, self.channels


class Table(_Record):
    """All entries of one device. ``tuned``: what they were measured on and against, for the reader."""

    format: Literal["loraforge.dispatch/1"] = SCHEMA
    device: str = Field(min_length=1)
    tuned: str
    entries: tuple[Entry, ...] = Field(min_length=1)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")

    @model_validator(mode="after")
    def _serves_both_phases_once(self) -> Table:
        if {entry.phase for entry in self.entries} != {"decode", "prefill"}:
            raise ValueError("needs entries of decode and of prefill")
        cells = [
            ((*entry.shape, entry.tokens, entry.rank), entry.adapters, entry.even) for entry in self.entries
        ]
        if len(set(cells)) != len(cells):
            raise ValueError("states a cell twice")
        if {place for place, *_ in cells} != {place for place, *only in cells if only == [None, False]}:
            raise ValueError("needs, beside an entry for a number of adapters or for even ranks, one for any")
        return self

    def __hash__(self) -> int:
        return hash(self.sha256)

    @classmethod
    def freeze(cls, device: str, tuned: str, entries: list[Entry]) -> Table:
        """A table with the hash of its content."""
        body = {
            "format": SCHEMA,
            "device": device,
            "tuned": tuned,
            "entries": [entry.model_dump(mode="json") for entry in entries],
        }
        return cls(device=device, tuned=tuned, entries=tuple(entries), sha256=_digest(body))

    def write(self, path: Path) -> None:
        """Write to ``path`` whole or not at all."""
        write_json(path, self.model_dump(mode="json"))


def load_table(device: str, path: Path | None = None) -> Table:
    """The table at ``path``, or that which ships for a device by its name, or the generic one.

    Raises InputError for a file that is no table, IntegrityError for one whose content is not what its hash says.
    """
    shipped = table_path(device)
    return _load(path or (shipped if shipped.is_file() else table_path(GENERIC)))


def table_path(device: str) -> Path:
    """Where the table of a device ships: ``NVIDIA H200`` in ``tables/nvidia-h200.json``."""
    return FOLDER / (re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json")


def steps_path(device: str) -> Path:
    """Where a device's table of engines' steps would ship: ``tables/nvidia-h200-steps.json``."""
    return table_path(f"{device} steps")


def load_steps(device: str) -> Table | None:
    """The table of a device for steps as engines run them; None where none ships. Raises as :func:`load_table` does."""
    path = steps_path(device)
    return _load(path) if path.is_file() else None


@lru_cache(maxsize=16)
def _load(path: Path) -> Table:
    value = read_json(path)
    try:
        table = Table.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(
            first["msg"],
            path=path,
            key=".".join(map(str, first["loc"])) or None,
            remedy=f"make the table again with {_MADE_BY}",
        ) from error
    body = {name: item for name, item in value.items() if name != "sha256"}
    if _digest(body) != table.sha256:
        raise IntegrityError(
            f"content is {_digest(body)}, its hash says {table.sha256}",
            path=path,
            key="sha256",
            remedy=f"tables are not edited by hand: make it again with {_MADE_BY}",
        )
    return table


@lru_cache(maxsize=4096)
def choose(
    table: Table,
    phase: Phase,
    d_in: int,
    channels: tuple[int, ...],
    tokens: int,
    rank: int,
    adapters: int | None = None,
    most: int | None = None,
    *,
    pair: bool = False,
) -> Choice:
    """The choice for up to ``tokens`` tokens on a projection whose slots have ``rank`` live directions in the mean.

    adapters: how many the batch has at most. most: the greatest of its ranks. None where that is not known. pair: the
    best separate shrink and expand, or native, instead.

    A projection that the table does not know takes the entries of the nearest one that it does: the same number of
    slices where there is one, then the least difference of the logarithms of input and output width. Buckets are
    upper bounds; beyond the last, the last serves. Cheap and cached: called when a shape is first met.
    """
    entry = _find(table, phase, d_in, channels, tokens, rank, adapters, most)
    return Choice.from_json(entry.pair if pair else entry.choice)


def covers(table: Table, phase: Phase, d_in: int, channels: tuple[int, ...], tokens: int, rank: int) -> bool:
    """Whether the table knows just this projection, in buckets that hold so many tokens and such a mean rank: whether
    :func:`choose` answers with what was tuned, not with the nearest there is."""
    entries = _shapes(table).get((phase, d_in, channels), [])
    within = min((entry.tokens for entry in entries if entry.tokens >= tokens), default=None)
    return any(entry.rank >= rank for entry in entries if entry.tokens == within)


def _find(
    table: Table,
    phase: Phase,
    d_in: int,
    channels: tuple[int, ...],
    tokens: int,
    rank: int,
    adapters: int | None,
    most: int | None,
) -> Entry:
    shapes = _shapes(table)
    known = [shape for shape in shapes if shape[0] == phase]
    nearest = min(known, key=lambda shape: (_distance(shape, d_in, channels), shape))
    entries = shapes[nearest]
    bounds = sorted({entry.tokens for entry in entries})
    within = next((bound for bound in bounds if bound >= tokens), bounds[-1])
    many = math.inf if adapters is None else adapters
    even = most is not None and most <= EVEN * rank
    row = [
        entry
        for entry in entries
        if entry.tokens == within and _adapters(entry) >= many and entry.even <= even
    ]
    row.sort(key=lambda entry: (entry.rank, _adapters(entry), not entry.even))
    bucket = next((entry.rank for entry in row if entry.rank >= rank), row[-1].rank)
    return next(entry for entry in row if entry.rank == bucket)


def _adapters(entry: Entry) -> float:
    """Adapters that an entry stands for."""
    return math.inf if entry.adapters is None else entry.adapters


@lru_cache(maxsize=16)
def _shapes(table: Table) -> dict[tuple[Phase, int, tuple[int, ...]], list[Entry]]:
    found: dict[tuple[Phase, int, tuple[int, ...]], list[Entry]] = {}
    for entry in table.entries:
        found.setdefault(entry.shape, []).append(entry)
    return found


def _distance(
    shape: tuple[Phase, int, tuple[int, ...]], d_in: int, channels: tuple[int, ...]
) -> tuple[bool, float]:
    _, other_in, other_channels = shape
    widths = abs(math.log(other_in / d_in)) + abs(math.log(sum(other_channels) / sum(channels)))
    return len(other_channels) != len(channels), widths


def _digest(body: dict[str, Any]) -> str:
    return sha256_text(canonical_json(body))
