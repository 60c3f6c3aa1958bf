"""Put the plugin's classes where the engine looks for its own."""

from __future__ import annotations

from typing import Any

from vllm.config import CompilationMode
from vllm.lora import utils, worker_manager
from vllm.lora.layers import LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.platforms.cpu import CpuPlatform

from loraforge import __version__
from loraforge.runtime.vllm.admission import checked
from loraforge.runtime.vllm.layers import Occupied, OccupiedEmbedding, PooledLinear, derive
from loraforge.runtime.vllm.manager import LoRAForgeModelManager

_PUNICA = "loraforge.runtime.vllm.punica.PunicaWrapperLoRAForge"


def activate() -> None:
    """Rebind the engine's classes in this process, once."""
    worker = worker_manager.LRUCacheWorkerLoRAManager
    if worker._manager_cls is LoRAForgeModelManager:
        return
    CpuPlatform.get_punica_wrapper = classmethod(lambda _: _PUNICA)
    CpuPlatform.check_and_update_config = classmethod(_compiling(CpuPlatform.check_and_update_config))
    utils._all_lora_classes = tuple(map(_ours, utils._all_lora_classes))
    utils.LogitsProcessorWithLoRA = derive(Occupied, LogitsProcessorWithLoRA)
    worker._load_adapter = checked(worker._load_adapter)
    worker._manager_cls = LoRAForgeModelManager


def _ours(native: type) -> type:
    if issubclass(native, BaseLinearLayerWithLoRA):
        return derive(PooledLinear, native)
    return derive(OccupiedEmbedding, native) if native is VocabParallelEmbeddingWithLoRA else native


def _compiling(check: Any) -> Any:
    """The platform's check of a configuration, which then leaves compilation as it would be without LoRA.

    On a CPU the engine does not compile a model with LoRA, since its own products cannot be traced; ours can.
    """

    def check_and_update_config(_: type, vllm_config: Any) -> None:
        compilation = vllm_config.compilation_config
        asked = compilation.mode
        check(vllm_config)
        if asked in (CompilationMode.VLLM_COMPILE, CompilationMode.DYNAMO_TRACE_ONCE):
            compilation.mode = CompilationMode.DYNAMO_TRACE_ONCE
        options = vllm_config.additional_config
        if isinstance(options, dict):  # part of the key of the engine's cache of compiled code
            vllm_config.additional_config = {**options, "loraforge": __version__}

    return check_and_update_config
