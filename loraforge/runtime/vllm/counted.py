"""The engine's LoRA manager with counters: what goes into its slots and leaves them, whoever runs the products."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.lora.model_manager import LRUCacheLoRAModelManager

from loraforge.errors import LoraForgeError, OutputError
from loraforge.runtime import counters
from loraforge.runtime.pool import Counters

logger = init_logger("vllm.loraforge")  # the engine prints what is below its own name


class CountedModelManager(LRUCacheLoRAModelManager):
    """Tells :mod:`loraforge.runtime.counters` of every load and unload. Adapters that the engine makes up to warm
    itself are forgotten when it drops them."""

    def __init__(self, *args: Any, vllm_config: Any, **kwargs: Any) -> None:
        self._first = vllm_config.parallel_config.rank == 0
        super().__init__(*args, vllm_config=vllm_config, **kwargs)
        self.publish()

    def counts(self) -> dict[str, int | str | None]:
        """What there is to tell, but for the peak of the device's memory."""
        raise NotImplementedError

    def publish(self) -> None:
        """Tell of the present state, from the first of several processes. Raises OutputError where that fails."""
        if self._first and counters.wanted():
            gpu = torch.device(self.device).type == "cuda"
            peak = torch.cuda.max_memory_allocated(self.device) if gpu else None
            counters.publish({**self.counts(), "peak_allocated_bytes": peak})

    def _update(self) -> None:
        """The same while requests run, which do not fail for it."""
        try:
            self.publish()
        except OutputError as error:
            logger.warning_once(f"LoRAForge no longer tells what it counts: {error}")

    def put(self, slot: int, adapter: Any) -> None:
        """The engine has filled a slot."""
        raise NotImplementedError

    def empty(self, slot: int) -> None:
        """The engine is about to empty a slot."""
        raise NotImplementedError

    def restart(self) -> None:
        """Count from zero."""
        raise NotImplementedError

    def activate_adapter(self, lora_id: int) -> bool:
        loaded: bool = super().activate_adapter(lora_id)
        if loaded:
            try:
                self.put(self.lora_index_to_id.index(lora_id), self._registered_adapters.cache[lora_id])
            except BaseException:
                self.deactivate_adapter(lora_id)
                raise
            self._last_mapping = None  # which layers need the engine's metadata may have changed
            self._update()
        return loaded

    def _deactivate_adapter(self, lora_id: int) -> None:
        held = lora_id in self.lora_index_to_id
        if held:
            self.empty(self.lora_index_to_id.index(lora_id))
        super()._deactivate_adapter(lora_id)
        if held:
            self._last_mapping = None
            self._update()

    def remove_all_adapters(self) -> None:
        # the engine forgets the slots before it drops their adapters
        for lora_id in list(self._active_adapters.cache):
            self._deactivate_adapter(lora_id)
        super().remove_all_adapters()
        self.restart()
        self._update()


class NativeModelManager(CountedModelManager):
    """The engine's own execution, counted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._counters = Counters()
        self._slots: dict[int, int] = {}  # slot -> bytes that were copied into it
        super().__init__(*args, **kwargs)
        if torch.device(self.device).type == "cuda":
            require_tiles()

    def counts(self) -> dict[str, int | str | None]:
        held = device_bytes(self.modules.values())
        return {
            "execution": "native",
            "pool": "native",
            **vars(self._counters),
            "capacity_bytes": held,
            "live_bytes": sum(self._slots.values()),
            "lora_bytes": held,
            "adapters": len(self._slots),
        }

    def put(self, slot: int, adapter: Any) -> None:
        copied = sum(
            tensor.numel() * tensor.element_size()
            for name in self.modules
            for tensor in _tensors(self._get_lora_layer_weights(adapter, name))
        )
        self._slots[slot] = copied
        self._counters.loads += 1
        self._counters.source_bytes += copied

    def empty(self, slot: int) -> None:
        if self._slots.pop(slot, None) is not None:
            self._counters.unloads += 1

    def restart(self) -> None:
        self._counters = Counters()


def require_tiles() -> None:
    """Raise LoraForgeError where the environment names a folder of tuned tiles that has none of this device: the engine
    warns once, serves by its defaults, and would be measured as the tuned baseline that it is not."""
    from vllm import envs
    from vllm.lora.ops.triton_ops.utils import load_lora_op_config  # needs Triton, which a CPU may not have

    folder = envs.VLLM_TUNED_CONFIG_FOLDER
    for op, added in (("shrink", None), ("expand", True)):
        if folder is not None and load_lora_op_config(op, added) is None:
            raise LoraForgeError(
                f"has no tiles of the LoRA {op} for a {torch.cuda.get_device_name()}",
                path=Path(folder).absolute(),
                key="VLLM_TUNED_CONFIG_FOLDER",
                remedy="start where the relative path begins, or leave it out to serve untuned",
            )


def device_bytes(modules: Iterable[Any]) -> int:
    """Bytes of the engine's own buffers of adapters in LoRA layers, each storage once."""
    storages = {}
    for module in modules:
        for name, value in vars(module).items():
            if "lora" in name:
                for tensor in _flat(value):
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(weights: Any) -> Iterator[Tensor]:
    if weights is not None:
        yield from _flat(weights.lora_a)
        yield from _flat(weights.lora_b)


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _flat(item)
