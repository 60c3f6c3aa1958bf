"""The SGLang plugin: entry point ``sglang.srt.plugins``, loaded by the engine into each of its processes.

The engine logs and forgets what a plugin raises. So the plugin never raises where that would go unseen: a server that
asks for the backend ``loraforge`` starts with it or says why not and ends.
"""

from __future__ import annotations

import os

BACKEND = "loraforge"  # what --lora-backend takes
SWITCH = "LORAFORGE_SGLANG"  # environment: 0 leaves the engine as it is, native only counts what it loads
TRACE = "LORAFORGE_ADMISSION_TRACE"  # environment: a file, which gets a JSON line for every step
EARLY_STOP = "LORAFORGE_EARLY_STOP"  # environment: 1 has answers end where their requests say
STOP_AT = "loraforge_stop_at"  # key of a request's custom_params: tokens of its answer


def switch() -> str:
    """What the environment says: ``1`` where it says nothing. Raises UsageError for what means nothing."""
    said = os.environ.get(SWITCH, "1")
    if said not in ("1", "0", "native"):
        from loraforge.errors import UsageError

        raise UsageError(repr(said), key=SWITCH, remedy="give 1, 0 or native")
    return said


def register() -> None:
    """Offer the backend ``loraforge``; may be called several times in a process.

    A version of the engine that is not supported is refused where the backend is asked for, on the command line or in
    the engine. Ends the process for options that mean nothing.
    """
    from loraforge.errors import LoraForgeError

    try:
        if (said := switch()) == "0":
            return
        from loraforge.runtime.sglang import activate

        activate.activate(native=said == "native")
    except LoraForgeError as error:
        raise SystemExit(str(error)) from error
