"""The engine's LoRA manager: makes the pool when the layers are known, and keeps it in step with the slots."""

from __future__ import annotations

import heapq
from typing import Any

from vllm.logger import init_logger
from vllm.lora.model_manager import DEFAULT_LANGUAGE_WRAPPER_KEY, LRUCacheLoRAModelManager

import loraforge
from loraforge.errors import LoraForgeError
from loraforge.ops.cpu import native
from loraforge.runtime.pool import RaggedPool, block_bytes
from loraforge.runtime.ranks import Projection, live_rank
from loraforge.runtime.vllm import opaque
from loraforge.runtime.vllm.arguments import POOL_BYTES
from loraforge.runtime.vllm.layers import OccupiedEmbedding, PooledLinear
from loraforge.runtime.vllm.punica import PunicaWrapperLoRAForge
from loraforge.runtime.vllm.version import require

logger = init_logger("vllm.loraforge")  # the engine prints what is below its own name


class LoRAForgeModelManager(LRUCacheLoRAModelManager):
    """Adapters live in the engine's slots, under its LRU rule; their live directions lie in ``pool``.

    An adapter is refused, when it is registered, if the pool could not hold it beside the largest others that the
    engine may want at once: no batch can then fail for want of room.
    """

    def __init__(self, *args: Any, vllm_config: Any, **kwargs: Any) -> None:
        options = vllm_config.additional_config
        self._pool_bytes: int | None = options.get(POOL_BYTES) if isinstance(options, dict) else None
        self._opaque: dict[str, Any] = vllm_config.compilation_config.static_forward_context
        self._footprints: dict[int, int] = {}
        self.whole_model = vllm_config.parallel_config.pipeline_parallel_size == 1
        super().__init__(*args, vllm_config=vllm_config, **kwargs)

    def _create_lora_modules(self) -> None:
        super()._create_lora_modules()
        layers = {
            name: layer
            for name, layer in self.modules.items()
            if isinstance(layer, PooledLinear) and layer.pooled  # type: ignore[attr-defined]
        }
        punica = self.punica_wrapper_mapping.get(DEFAULT_LANGUAGE_WRAPPER_KEY)
        if not layers or not isinstance(punica, PunicaWrapperLoRAForge):
            raise LoraForgeError(
                f"{len(layers)} of {len(self.modules)} LoRA layers can be served, by {type(punica).__name__}",
                key=type(self.model).__name__,
                remedy="set LORAFORGE_VLLM=0 to serve this model without LoRAForge",
            )
        projections = {name: layer.projection(name) for name, layer in layers.items()}
        self.pool = RaggedPool(
            projections.values(),
            self.lora_slots,
            self._capacity(projections) if self._pool_bytes is None else self._pool_bytes,
            self.lora_config.lora_dtype,
            self.device,
        )
        for name, layer in self.modules.items():
            if isinstance(layer, PooledLinear | OccupiedEmbedding):
                layer.key = opaque.key(name)
                self._opaque[layer.key] = layer
        for name, layer in layers.items():
            layer.join(self.pool, punica.batch, projections[name])
        logger.info(
            "LoRAForge %s is active in %s: %d of %d LoRA layers from a ragged pool of at most %d bytes, %d slots, %s",
            *(loraforge.__version__, require(), len(layers), len(self.modules)),
            *(self.pool.capacity_bytes, self.lora_slots, native.instructions()),
        )

    def _capacity(self, projections: dict[str, Projection]) -> int:
        """Bytes that adapters of the largest rank in every slot would take."""
        slots: int = self.lora_slots
        rank, dtype = self.lora_config.max_lora_rank, self.lora_config.lora_dtype
        return slots * sum(
            block_bytes(projection, [rank] * len(projection.channels), dtype)
            for projection in projections.values()
        )

    def _add_adapter(self, lora: Any) -> None:
        super()._add_adapter(lora)
        self._footprints[lora.id] = self._footprint(lora)
        # of those that left the engine's cache too: a request may bring them back in the middle of a step
        most = sum(heapq.nlargest(self.lora_slots, self._footprints.values()))
        if most > self.pool.capacity_bytes:
            needs = self._footprints[lora.id]
            self.remove_adapter(lora.id)
            raise LoraForgeError(
                f"adapter {lora.id} needs {needs} bytes of the pool; with the largest others in "
                f"{self.lora_slots} slots that makes {most}, and the pool has {self.pool.capacity_bytes}",
                key=POOL_BYTES,
                remedy="give the pool more bytes or the engine fewer slots (--max-loras)",
            )

    def _footprint(self, lora: Any) -> int:
        """Bytes that an adapter takes in the pool."""
        total = 0
        for name, projection in self.pool.projections.items():
            weights = self._get_lora_layer_weights(lora, name)
            if not weights:
                continue
            packed = isinstance(weights.lora_a, list)
            pairs = (
                zip(weights.lora_a, weights.lora_b, strict=True)
                if packed
                else [(weights.lora_a, weights.lora_b)]
            )
            ranks = [0 if a is None or b is None else live_rank(a, b) for a, b in pairs]
            if len(ranks) != len(projection.channels):  # the layer will split them itself
                ranks = [max(ranks)] * len(projection.channels)
            total += block_bytes(projection, ranks, self.lora_config.lora_dtype)
        return total

    def activate_adapter(self, lora_id: int) -> bool:
        try:
            loaded: bool = super().activate_adapter(lora_id)
        except Exception:
            self.remove_adapter(lora_id)  # or half of it would stay in its slot
            raise
        if loaded:
            self.pool.counters.loads += 1
        return loaded

    def _deactivate_adapter(self, lora_id: int) -> None:
        if lora_id in self.lora_index_to_id:
            self.pool.clear(self.lora_index_to_id.index(lora_id))
            self.pool.counters.unloads += 1
        super()._deactivate_adapter(lora_id)

    def remove_adapter(self, adapter_id: int) -> bool:
        self._footprints.pop(adapter_id, None)
        removed: bool = super().remove_adapter(adapter_id)
        return removed

    def remove_all_adapters(self) -> None:
        # the engine forgets the slots before it drops their adapters
        for lora_id in list(self._active_adapters.cache):
            self._deactivate_adapter(lora_id)
        super().remove_all_adapters()
        self._footprints.clear()
