"""Tuned tiles of the engines' kernels: data that ``loraforge bench tune`` writes and the tuned baselines read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from loraforge.bench.cases import Case, Op
from loraforge.errors import InputError
from loraforge.files import read_json, write_json

FOLDER = Path(__file__).resolve().parent / "tuned"


class TunedTiles(BaseModel):
    """The best tiles of one kernel where they were measured; None: the engine's own choice was the best."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: Literal["csgmv", "vllm"]
    op: Literal["shrink", "expand"]
    phase: Literal["decode", "prefill"]
    model: str
    projection: str
    tokens: int = Field(ge=1)
    rank: int = Field(ge=1)
    tiles: dict[str, int] | None
    speedup: float = Field(ge=1)


def write_tiles(path: Path, found: list[TunedTiles]) -> None:
    """Write all of a device."""
    write_json(path, [item.model_dump(mode="json") for item in found])


def read_tiles(path: Path) -> list[TunedTiles]:
    """What :func:`write_tiles` wrote. Raises InputError that names the entry and the key."""
    value = read_json(path)
    if not isinstance(value, list):
        raise InputError("is not a list of tiles", path=path, remedy="make it with loraforge bench tune")
    found = []
    for number, item in enumerate(value):
        try:
            found.append(TunedTiles.model_validate(item))
        except ValidationError as error:
            first = error.errors()[0]
            raise InputError(
                first["msg"],
                path=path,
                key=".".join(map(str, (number, *first["loc"]))),
                remedy="make it again with loraforge bench tune",
            ) from error
    return found


def lookup(found: list[TunedTiles], engine: str) -> Callable[[Op, Case], Mapping[str, int] | None]:
    """Tiles by operation and case: those of the projection that were measured at the nearest rank, then token count,
    both by ratio; None where the projection was not measured, or where the engine's own choice was the best."""
    own: dict[tuple[str, str, str, str], list[TunedTiles]] = {}
    for item in found:
        if item.engine == engine:
            own.setdefault((item.op, item.phase, item.model, item.projection), []).append(item)

    def tiles(op: Op, case: Case) -> Mapping[str, int] | None:
        measured = own.get((op, case.phase, case.projection.model, case.projection.name))
        if not measured:
            return None
        return min(
            measured,
            key=lambda item: (ratio(item.rank, case.capacity), ratio(item.tokens, case.tokens)),
        ).tiles

    return tiles


def ratio(a: int, b: int) -> float:
    """How far two counts are from each other, at least 1."""
    return max(a, b) / min(a, b)
