"""The vLLM plugin: entry point ``vllm.general_plugins``, loaded by the engine into each of its processes.

Importing this module needs nothing: vLLM logs and forgets a plugin that cannot be imported, and would then serve
without it. What :func:`register` raises stops the server.
"""

from __future__ import annotations

import os

SWITCH = "LORAFORGE_VLLM"  # environment: 0 leaves the engine as it is, native only counts what it loads


def switch() -> str:
    """What the environment says: ``1`` where it says nothing. Raises UsageError for what means nothing."""
    said = os.environ.get(SWITCH, "1")
    if said not in ("1", "0", "native"):
        from loraforge.errors import UsageError

        raise UsageError(repr(said), key=SWITCH, remedy="give 1, 0 or native")
    return said


def register() -> None:
    """Put LoRAForge behind the engine's LoRA layers; may be called several times in a process.

    Raises LoraForgeError for a version of the engine that is not supported, and for a switch that means nothing.
    """
    if (said := switch()) == "0":
        return
    from loraforge.runtime.vllm.version import require

    require()
    from loraforge.runtime.vllm import activate

    if said == "native":
        activate.count_native()
    else:
        activate.activate()
