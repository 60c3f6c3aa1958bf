"""The plugin's options. The engine hands the flags of a plugin to none of its processes: the environment does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from loraforge.errors import UsageError
from loraforge.runtime.options import HELP, POOLS, WANTED, PoolOptions

POOL = "LORAFORGE_POOL"
POOL_BYTES = "LORAFORGE_POOL_BYTES"
RANKS = "LORAFORGE_RANKS"
FLAGS: dict[str, tuple[str, dict[str, Any]]] = {  # flag -> variable, and what argparse is told
    "--loraforge-pool": (POOL, {"choices": POOLS, "help": HELP["pool"]}),
    "--loraforge-pool-bytes": (POOL_BYTES, {"help": HELP["pool_bytes"]}),
    "--loraforge-ranks": (RANKS, {"help": "JSON: mean live rank by a module's last name, to choose kernels"}),
}
_VARIABLES = {"pool": POOL, "pool_bytes": POOL_BYTES, "ranks": RANKS}
_AS_TEXT = {"ranks": f"a JSON object with {WANTED['ranks']}"}


class Options(PoolOptions):
    """The pool's options of a process's environment."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Options:
        """Of a process's environment. Raises UsageError for a value that means nothing."""
        given = {name: environment[key] for name, key in _VARIABLES.items() if key in environment}
        options = cls(**{name: _value(name, text) for name, text in given.items()})
        if (odd := options.odd()) is not None:
            raise UsageError(
                repr(given[odd]), key=_VARIABLES[odd], remedy=f"give {_AS_TEXT.get(odd, WANTED[odd])}"
            )
        return options


def _value(name: str, text: str) -> Any:
    """What a variable says; as it stands where it says nothing that is meant."""
    if name == "pool_bytes":
        return int(text) if text.isascii() and text.isdecimal() else text
    if name == "ranks":
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text
