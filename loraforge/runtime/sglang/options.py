"""The plugin's options. The engine hands the flags of a plugin to none of its processes: the environment does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loraforge.errors import UsageError

POOL = "LORAFORGE_POOL"
POOL_BYTES = "LORAFORGE_POOL_BYTES"
RANKS = "LORAFORGE_RANKS"
POOLS = ("ragged", "shadow")
FLAGS: dict[str, tuple[str, dict[str, Any]]] = {  # flag -> variable, and what argparse is told
    "--loraforge-pool": (POOL, {"choices": POOLS, "help": "how LoRAForge keeps adapters on the device"}),
    "--loraforge-pool-bytes": (POOL_BYTES, {"help": "capacity of LoRAForge's pool of adapters"}),
    "--loraforge-ranks": (RANKS, {"help": "JSON: mean live rank by a module's last name, to choose kernels"}),
}


@dataclass(frozen=True)
class Options:
    """pool: one of POOLS. pool_bytes: capacity, None for adapters of the largest rank in every slot. ranks: mean
    live rank by a module's last name, for the choice of kernels alone."""

    pool: str = "ragged"
    pool_bytes: int | None = None
    ranks: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Options:
        """Of a process's environment. Raises UsageError for a value that means nothing."""
        pool = environment.get(POOL, cls.pool)
        if pool not in POOLS:
            raise _bad(POOL, pool, " or ".join(POOLS))
        given = environment.get(POOL_BYTES)
        if given is not None and not (given.isascii() and given.isdecimal() and int(given) > 0):
            raise _bad(POOL_BYTES, given, "a number of bytes")
        return cls(pool, None if given is None else int(given), _ranks(environment.get(RANKS, "{}")))


def _ranks(text: str) -> dict[str, int]:
    try:
        ranks = json.loads(text)
    except ValueError:
        ranks = None
    if not isinstance(ranks, dict) or not all(type(rank) is int and rank > 0 for rank in ranks.values()):
        raise _bad(RANKS, text, "a JSON object with a rank for each name of a module")
    return ranks


def _bad(variable: str, value: str, wanted: str) -> UsageError:
    return UsageError(repr(value), key=variable, remedy=f"give {wanted}")
