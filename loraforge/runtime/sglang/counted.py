"""The engine's own memory pool with counters: what goes into its slots and leaves them, whoever runs the products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.lora.mem_pool import LoRAMemoryPool
from torch import Tensor

from loraforge.runtime import counters
from loraforge.runtime.pool import Counters


class NativeMemoryPool(LoRAMemoryPool):
    """The engine's own execution, counted."""

    def init_buffers(self, base_model: Any) -> None:
        super().init_buffers(base_model)
        self._counters = Counters()
        self._live: dict[int, int] = {}  # slot -> bytes that were copied into it
        self._publish()

    def load_lora_weight_to_buffer(
        self, uid: str | None, buffer_id: int, lora_adapter: Any, *args: Any, **kwargs: Any
    ) -> None:
        super().load_lora_weight_to_buffer(uid, buffer_id, lora_adapter, *args, **kwargs)
        if uid is None:
            return
        self._leave(buffer_id)
        self._live[buffer_id] = copied = sum(tensor.nbytes for tensor in _weights(lora_adapter))
        self._counters.loads += 1
        self._counters.source_bytes += copied
        self._publish()

    def _clear_buffer_slot_for_base(self, buffer_id: int) -> None:
        super()._clear_buffer_slot_for_base(buffer_id)
        self._leave(buffer_id)
        self._publish()

    def _leave(self, slot: int) -> None:
        if self._live.pop(slot, None) is not None:
            self._counters.unloads += 1

    def _publish(self) -> None:
        if self.tp_rank or not counters.wanted():
            return
        held = native_bytes(self)
        device = next(self.base_model.parameters()).device
        counters.publish(
            {
                "execution": "native",
                "pool": "native",
                **vars(self._counters),
                "capacity_bytes": held,
                "live_bytes": sum(self._live.values()),
                "lora_bytes": held,
                "adapters": len(self._live),
                "peak_allocated_bytes": torch.cuda.max_memory_allocated(device)
                if device.type == "cuda"
                else None,
            }
        )


def native_bytes(pool: LoRAMemoryPool) -> int:
    """Bytes of the engine's own buffers of adapters."""
    stacked = [
        tensor for its in (pool.A_buffer, pool.B_buffer) for layers in its.values() for tensor in layers
    ]
    single = (
        pool.embedding_A_buffer,
        pool.embedding_B_buffer,
        pool.lm_head_A_buffer,
        pool.lm_head_B_buffer,
        pool.new_embeddings_buffer,
    )
    return sum(tensor.nbytes for tensor in (*stacked, *(tensor for its in single for tensor in its.values())))


def _weights(adapter: Any) -> Iterator[Tensor]:
    for layer in adapter.layers:
        yield from layer.weights.values()
    yield from adapter.embedding_layers.values()
