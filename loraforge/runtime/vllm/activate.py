"""Put the plugin's classes where the engine looks for its own."""

from __future__ import annotations

from vllm.engine.arg_utils import EngineArgs
from vllm.lora import utils, worker_manager
from vllm.lora.layers import LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

from loraforge.runtime.vllm import command_line, platform, scheduler, unloading
from loraforge.runtime.vllm.admission import checked
from loraforge.runtime.vllm.counted import NativeModelManager
from loraforge.runtime.vllm.layers import Occupied, OccupiedEmbedding, PooledLinear, derive
from loraforge.runtime.vllm.manager import LoRAForgeModelManager
from loraforge.runtime.vllm.options import Options


def activate() -> None:
    """Rebind the engine's classes in this process, once."""
    command_line.extend(EngineArgs, unloading.complete)
    worker = worker_manager.LRUCacheWorkerLoRAManager
    if worker._manager_cls is LoRAForgeModelManager:
        return
    platform.adopt()
    platform.then(Options.of)  # what means nothing is refused before a model is loaded
    platform.then(scheduler.install)
    utils._all_lora_classes = tuple(map(_ours, utils._all_lora_classes))
    utils.LogitsProcessorWithLoRA = derive(Occupied, LogitsProcessorWithLoRA)
    worker._load_adapter = checked(worker._load_adapter)
    worker._manager_cls = LoRAForgeModelManager


def count_native() -> None:
    """Leave the engine's execution as it is and count what it loads, once. The flags are taken, and mean nothing; when
    prompts are scheduled is no matter of execution, so that arms can be alike in it."""
    command_line.extend(EngineArgs)
    worker = worker_manager.LRUCacheWorkerLoRAManager
    if worker._manager_cls is NativeModelManager:
        return
    platform.then(scheduler.install)
    worker._manager_cls = NativeModelManager


def _ours(native: type) -> type:
    if issubclass(native, BaseLinearLayerWithLoRA):
        return derive(PooledLinear, native)
    return derive(OccupiedEmbedding, native) if native is VocabParallelEmbeddingWithLoRA else native
