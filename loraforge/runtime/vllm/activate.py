"""Put the plugin's classes where the engine looks for its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.lora import utils, worker_manager
from vllm.lora.layers import LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.platforms.cpu import CpuPlatform

from loraforge.runtime.ranks import check_manifest, live_rank
from loraforge.runtime.vllm.layers import Occupied, PooledLinear, derive
from loraforge.runtime.vllm.manager import LoRAForgeModelManager

_PUNICA = "loraforge.runtime.vllm.punica.PunicaWrapperLoRAForge"


def activate() -> None:
    """Rebind the engine's classes in this process, once."""
    worker = worker_manager.LRUCacheWorkerLoRAManager
    if worker._manager_cls is LoRAForgeModelManager:
        return
    CpuPlatform.get_punica_wrapper = classmethod(lambda _: _PUNICA)
    utils._all_lora_classes = tuple(map(_ours, utils._all_lora_classes))
    utils.LogitsProcessorWithLoRA = derive(Occupied, LogitsProcessorWithLoRA)
    worker._load_adapter = _checked(worker._load_adapter)
    worker._manager_cls = LoRAForgeModelManager


def _ours(native: type) -> type:
    if issubclass(native, BaseLinearLayerWithLoRA):
        return derive(PooledLinear, native)
    return derive(Occupied, native) if native is VocabParallelEmbeddingWithLoRA else native


def _checked(load: Any) -> Any:
    """The engine's loader, which then holds an adapter's tensors against its manifest, where there is one."""

    def load_adapter(self: Any, lora_request: Any) -> Any:
        lora = load(self, lora_request)
        ranks = {
            name: live_rank(weights.lora_a, weights.lora_b)
            for name, weights in lora.loras.items()
            if not weights.is_packed
        }
        check_manifest(Path(utils.get_adapter_absolute_path(lora_request.lora_path)), ranks)
        return lora

    return load_adapter
