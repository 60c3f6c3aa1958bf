"""The plugin's options: keys of the engine's ``--additional-config``, two of which have flags of their own."""

from __future__ import annotations

from typing import Any

from loraforge.errors import LoraForgeError
from loraforge.runtime.options import HELP, POOLS, WANTED, PoolOptions

POOL = "loraforge_pool"
POOL_BYTES = "loraforge_pool_bytes"
RANKS = "loraforge_ranks"
FLAGS: dict[str, tuple[str, dict[str, Any]]] = {  # flag -> key, and what argparse is told
    "--loraforge-pool": (POOL, {"choices": POOLS, "help": HELP["pool"]}),
    "--loraforge-pool-bytes": (POOL_BYTES, {"type": int, "help": HELP["pool_bytes"]}),
}
_KEYS = {"pool": POOL, "pool_bytes": POOL_BYTES, "ranks": RANKS}


class Options(PoolOptions):
    """The pool's options of an engine's configuration."""

    @classmethod
    def of(cls, vllm_config: Any) -> Options:
        """Of an engine's configuration. Raises LoraForgeError for a value that means nothing."""
        given = vllm_config.additional_config
        given = given if isinstance(given, dict) else {}
        options = cls(**{name: given[key] for name, key in _KEYS.items() if key in given})
        if (odd := options.odd()) is not None:
            raise LoraForgeError(
                f"{getattr(options, odd)!r} in the engine's additional_config",
                key=_KEYS[odd],
                remedy=f"give {WANTED[odd]}",
            )
        return options
