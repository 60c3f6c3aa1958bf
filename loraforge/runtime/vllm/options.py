"""The plugin's options: keys of the engine's ``--additional-config``, two of which have flags of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loraforge.errors import LoraForgeError

POOL = "loraforge_pool"
POOL_BYTES = "loraforge_pool_bytes"
RANKS = "loraforge_ranks"
POOLS = ("ragged", "shadow")
FLAGS: dict[str, tuple[str, dict[str, Any]]] = {  # flag -> key, and what argparse is told
    "--loraforge-pool": (POOL, {"choices": POOLS, "help": "how LoRAForge keeps adapters on the device"}),
    "--loraforge-pool-bytes": (POOL_BYTES, {"type": int, "help": "capacity of LoRAForge's pool of adapters"}),
}


@dataclass(frozen=True)
class Options:
    """pool: one of POOLS. pool_bytes: capacity, None for adapters of the largest rank in every slot. ranks: mean
    live rank by a module's last name, for the choice of kernels alone."""

    pool: str = "ragged"
    pool_bytes: int | None = None
    ranks: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, vllm_config: Any) -> Options:
        """Of an engine's configuration. Raises LoraForgeError for a value that means nothing."""
        given = vllm_config.additional_config
        given = given if isinstance(given, dict) else {}
        options = cls(given.get(POOL, cls.pool), given.get(POOL_BYTES), given.get(RANKS, {}))
        if options.pool not in POOLS:
            raise _bad(POOL, options.pool, " or ".join(POOLS))
        if options.pool_bytes is not None and not _positive(options.pool_bytes):
            raise _bad(POOL_BYTES, options.pool_bytes, "a number of bytes")
        if not isinstance(options.ranks, dict) or not all(map(_positive, options.ranks.values())):
            raise _bad(RANKS, options.ranks, "a rank for each name of a module")
        return options


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _bad(key: str, value: Any, wanted: str) -> LoraForgeError:
    return LoraForgeError(f"{value!r} in the engine's additional_config", key=key, remedy=f"give {wanted}")
