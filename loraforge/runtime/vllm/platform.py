"""What differs between the platforms that the plugin serves on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.config import CompilationMode
from vllm.platforms import current_platform

from loraforge import __version__
from loraforge.errors import LoraForgeError


def adopt() -> None:
    """Have the engine's platform give our LoRA batch, and compile what it may.

    Raises LoraForgeError on a platform that the plugin does not serve on.
    """
    if current_platform.is_cpu():
        wrapper, compilation = "punica_cpu", _compiling
    elif current_platform.is_cuda():
        wrapper, compilation = "punica_cuda", _as_asked
    else:
        raise LoraForgeError(
            f"the plugin does not serve on {current_platform.device_name}",
            key="platform",
            remedy="set LORAFORGE_VLLM=0 to serve without LoRAForge",
        )
    platform: Any = type(current_platform)
    name = f"loraforge.runtime.vllm.{wrapper}.PunicaWrapperLoRAForge"
    platform.get_punica_wrapper = classmethod(lambda _: name)
    platform.check_and_update_config = classmethod(_versioned(compilation(platform.check_and_update_config)))


def then(act: Callable[[Any], object]) -> None:
    """Have ``act`` called with a configuration when the engine's platform has checked it."""
    platform: Any = type(current_platform)
    check = platform.check_and_update_config

    def check_and_update_config(_: type, vllm_config: Any) -> None:
        check(vllm_config)
        act(vllm_config)

    platform.check_and_update_config = classmethod(check_and_update_config)


def _as_asked(check: Any) -> Any:
    return check


def _compiling(check: Any) -> Any:
    """The platform's check of a configuration, which then leaves compilation as it would be without LoRA.

    On a CPU the engine does not compile a model with LoRA, since its own products cannot be traced; ours can.
    """

    def checked(vllm_config: Any) -> None:
        compilation = vllm_config.compilation_config
        asked = compilation.mode
        check(vllm_config)
        if asked in (CompilationMode.VLLM_COMPILE, CompilationMode.DYNAMO_TRACE_ONCE):
            compilation.mode = CompilationMode.DYNAMO_TRACE_ONCE

    return checked


def _versioned(check: Any) -> Any:
    """The check, which then makes the plugin part of the key of the engine's cache of compiled code."""

    def check_and_update_config(_: type, vllm_config: Any) -> None:
        check(vllm_config)
        options = vllm_config.additional_config
        if isinstance(options, dict):
            vllm_config.additional_config = {**options, "loraforge": __version__}

    return check_and_update_config
