"""Put the plugin's classes where the engine looks for its own, in a process that asks for them."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Callable
from typing import Any

from sglang.srt.lora.backend import lora_registry
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from loraforge.errors import MissingDependencyError
from loraforge.runtime.sglang import BACKEND, command_line, scheduler, version
from loraforge.runtime.sglang.options import Options

Factory = Callable[[], type]


def activate(*, native: bool) -> None:
    """Register the backend, once a process. native: ``loraforge`` is the engine's csgmv, and all its backends count
    what they load, take measured tiles, and serve adapters that lack parts of attention too. Raises LoraForgeError for
    options that mean nothing."""
    backends: dict[str, Factory] = lora_registry.LORA_SUPPORTED_BACKENDS
    if BACKEND in backends:
        return
    problem = version.problem()
    scheduler.install(os.environ, problem)

    def offer(_: Any, parser: ArgumentParser) -> None:
        command_line.extend(parser, problem)

    HookRegistry.register("sglang.srt.server_args.ServerArgs.add_cli_args", offer, HookType.AFTER)
    if problem:
        backends[BACKEND] = _refusing(problem)
    elif native:
        backends[BACKEND] = backends["csgmv"]
        backends.update({name: _counted(factory) for name, factory in backends.items()})
    else:
        Options.of(os.environ)  # what means nothing is refused before a model is loaded
        backends[BACKEND] = create


def create() -> type:
    """The backend's class, for the engine's LoRA manager, which is about to make the rest: it finds our adapters,
    configurations and memory pool under the names of its own."""
    from sglang.srt.lora import lora_manager

    from loraforge.runtime.sglang.adapter import PackedAdapter, RankedConfig
    from loraforge.runtime.sglang.backend import LoRAForgeBackend
    from loraforge.runtime.sglang.memory import LiveMemoryPool

    lora_manager.LoRAConfig = RankedConfig
    lora_manager.LoRAAdapter = PackedAdapter
    lora_manager.LoRAMemoryPool = LiveMemoryPool
    return LoRAForgeBackend


def _refusing(problem: str) -> Factory:
    def refuse() -> type:
        raise MissingDependencyError(
            problem, key="lora_backend", remedy="install that version, or take another backend"
        )

    return refuse


def _counted(factory: Factory) -> Factory:
    def make() -> type:
        import torch
        from sglang.srt.lora import lora_manager

        from loraforge.runtime.sglang import tiles
        from loraforge.runtime.sglang.completed import CompletedAdapter
        from loraforge.runtime.sglang.counted import NativeMemoryPool

        if torch.cuda.is_available():
            tiles.install(torch.cuda.get_device_name())
        lora_manager.LoRAAdapter = CompletedAdapter
        lora_manager.LoRAMemoryPool = NativeMemoryPool
        return factory()

    return make
