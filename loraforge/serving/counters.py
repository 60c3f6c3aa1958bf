"""What an engine's plugin counts: a JSON file that its first worker replaces whenever a slot is loaded or emptied."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from loraforge.errors import InputError
from loraforge.files import read_json


class Counters(BaseModel):
    """A snapshot. Counts and bytes since the engine started, or as they are now."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    execution: Literal["native", "loraforge"]
    pool: Literal["ragged", "shadow", "native"]
    loads: int = Field(ge=0, description="adapters put into a slot")
    unloads: int = Field(ge=0, description="slots emptied")
    source_bytes: int = Field(ge=0, description="bytes copied from the host for loads")
    moves: int = Field(ge=0, description="blocks moved to make room")
    capacity_bytes: int = Field(ge=0, description="of the pool")
    live_bytes: int = Field(ge=0, description="of the pool that adapters take now")
    lora_bytes: int = Field(ge=0, description="all device memory held for LoRA")
    peak_allocated_bytes: int | None = Field(
        ge=0, description="high-water mark of the device since the start; null on a CPU"
    )
    adapters: int = Field(ge=0, description="adapters in slots now")


def read_counters(path: Path) -> Counters | None:
    """The snapshot in a file, None where no plugin has written one. Raises InputError for anything else in it."""
    if not Path(path).exists():
        return None
    try:
        return Counters.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(
            f"holds no counters: {first['msg']}",
            path=path,
            key=".".join(map(str, first["loc"])) or None,
            remedy="use the plugin of this version of loraforge",
        ) from error
