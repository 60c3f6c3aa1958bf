"""What both plugins are told of their pool, however the engine takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

POOLS = ("ragged", "shadow")
HELP = {
    "pool": "how LoRAForge keeps adapters on the device",
    "pool_bytes": "capacity of LoRAForge's pool of adapters",
}
WANTED = {  # what an option that means nothing is answered with
    "pool": " or ".join(POOLS),
    "pool_bytes": "a number of bytes",
    "ranks": "a rank for each name of a module",
}


@dataclass(frozen=True)
class PoolOptions:
    """pool: one of POOLS. pool_bytes: capacity, None for adapters of the largest rank in every slot. ranks: mean
    live rank by a module's last name, for the choice of kernels alone."""

    pool: str = "ragged"
    pool_bytes: int | None = None
    ranks: Mapping[str, int] = field(default_factory=dict)

    def odd(self) -> str | None:
        """The first option whose value means nothing; None where all do mean something."""
        if self.pool not in POOLS:
            return "pool"
        if self.pool_bytes is not None and not is_count(self.pool_bytes):
            return "pool_bytes"
        if not isinstance(self.ranks, dict) or not all(map(is_count, self.ranks.values())):
            return "ranks"
        return None


def is_count(value: Any) -> bool:
    """Whether a value is a whole number above 0."""
    return type(value) is int and value > 0
