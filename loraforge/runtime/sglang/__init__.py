"""The SGLang plugin: entry point ``sglang.srt.plugins``, loaded by the engine into each of its processes.

The engine logs and forgets what a plugin raises. So the plugin never raises where that would go unseen: a server that
asks for the backend ``loraforge`` starts with it or says why not and ends.
"""

from __future__ import annotations

import os

BACKEND = "loraforge"  # what --lora-backend takes
SWITCH = "LORAFORGE_SGLANG"  # environment: 0 leaves the engine as it is, native only counts what it loads


def register() -> None:
    """Offer the backend ``loraforge``; may be called several times in a process.

    A version of the engine that is not supported is refused where the backend is asked for, on the command line or in
    the engine. Ends the process for a switch that means nothing.
    """
    switch = os.environ.get(SWITCH, "1")
    if switch == "0":
        return
    if switch not in ("1", "native"):
        from loraforge.errors import LoraForgeError

        raise SystemExit(str(LoraForgeError(repr(switch), key=SWITCH, remedy="give 1, 0 or native")))
    from loraforge.runtime.sglang import activate

    activate.activate(native=switch == "native")
