"""The vLLM plugin: entry point ``vllm.general_plugins``, loaded by the engine into each of its processes.

Importing this module needs nothing: vLLM logs and forgets a plugin that cannot be imported, and would then serve
without it. What :func:`register` raises stops the server.
"""

from __future__ import annotations

import os

SWITCH = "LORAFORGE_VLLM"  # environment: 0 leaves the engine as it is


def register() -> None:
    """Put LoRAForge behind the engine's LoRA layers; may be called several times in a process.

    Raises LoraForgeError for a version of the engine that is not supported.
    """
    if os.environ.get(SWITCH, "1") == "0":
        return
    from loraforge.runtime.vllm.version import require

    require()
    from loraforge.runtime.vllm import arguments
    from loraforge.runtime.vllm.activate import activate

    arguments.add()
    activate()
