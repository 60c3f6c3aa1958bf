"""The engine's LoRA layers, their factors in the pool instead of buffers of the largest rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import is_forward_context_available

from loraforge.ops.cpu import DTYPES
from loraforge.ops.slots import MAX_SLICES
from loraforge.runtime.batch import Applied, Batch
from loraforge.runtime.pool import RaggedPool
from loraforge.runtime.ranks import Projection, trim
from loraforge.runtime.vllm import opaque

_SCRATCH: dict[tuple[Any, ...], Tensor] = {}


class PooledLinear:
    """Goes before one of the engine's linear LoRA layers.

    The engine's own code still takes an adapter apart (fused slices, shards), but into a scratch buffer of one slot
    that all layers of one shape share; the live directions are read off it into the pool. A layer that the kernels
    cannot serve keeps the engine's buffers and path.
    """

    key: str  # of this layer in the engine's forward context; set by the manager

    def create_lora_weights(self, max_loras: int, lora_config: Any, model_config: Any = None) -> None:
        layer: Any = self
        layer.pooled = (
            lora_config.lora_dtype in DTYPES
            and layer.n_slices <= MAX_SLICES
            and not lora_config.fully_sharded_loras
        )
        layer.filling = False
        native: Any = super()
        native.create_lora_weights(1 if layer.pooled else max_loras, lora_config, model_config)
        if layer.pooled:
            layer.lora_a_stacked = tuple(map(_shared, range(layer.n_slices), layer.lora_a_stacked))
            layer.lora_b_stacked = tuple(map(_shared, range(layer.n_slices), layer.lora_b_stacked))

    def projection(self, name: str) -> Projection:
        """What the pool has to know of this layer."""
        layer: Any = self
        return Projection(
            name, layer.lora_a_stacked[0].shape[-1], tuple(b.shape[-2] for b in layer.lora_b_stacked)
        )

    def join(self, pool: RaggedPool, batch: Batch, projection: Projection) -> None:
        """Serve from ``pool`` from now on."""
        layer: Any = self
        layer.pool, layer.pool_name = pool, projection.name
        layer.applied = Applied(pool, batch, projection)

    def reset_lora(self, index: int) -> None:
        layer: Any = self
        native: Any = super()
        if not layer.pooled:
            native.reset_lora(index)
        elif layer.filling:
            native.reset_lora(0)  # the engine's set_lora empties the scratch slot that it fills
        else:
            layer.pool.erase(index, layer.pool_name)

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        layer: Any = self
        native: Any = super()
        if not layer.pooled:
            native.set_lora(index, lora_a, lora_b)
            return
        layer.filling = True
        try:
            native.set_lora(0, lora_a, lora_b)
        finally:
            layer.filling = False
        pairs = zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True)
        layer.pool.write(index, layer.pool_name, [trim(a[0, 0], b[0, 0]) for a, b in pairs])

    def _apply_lora_to_output(self, x: Tensor, output: Tensor) -> Tensor:
        opaque.update(x, output, self.key)
        return output

    def update(self, y: Tensor, x: Tensor) -> None:
        """Add the adapters' part to the base layer's output ``y`` [..., channels], for its input ``x`` [..., d_in]."""
        layer: Any = self
        y, x = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
        if layer.pooled:
            layer.applied.add(y, x)
        else:
            native: Any = super()
            native._apply_lora_to_output(x, y)


class Occupied:
    """Goes before a LoRA layer that stays native (embeddings, logits): keeps count of the slots that use it.

    An engine's native products run over every token and the largest rank whether or not any adapter has such weights.
    """

    def create_lora_weights(self, max_loras: int, lora_config: Any, model_config: Any = None) -> None:
        layer: Any = self
        layer.occupied = set()
        native: Any = super()
        native.create_lora_weights(max_loras, lora_config, model_config)

    def set_mapping(self, punica_wrapper: Any) -> None:
        layer: Any = self
        native: Any = super()
        native.set_mapping(punica_wrapper)
        punica_wrapper.watch(layer.lora_b_stacked, layer.occupied)

    def reset_lora(self, index: int) -> None:
        layer: Any = self
        native: Any = super()
        native.reset_lora(index)
        layer.occupied.discard(index)

    def set_lora(self, index: int, lora_a: Tensor, lora_b: Tensor) -> None:
        layer: Any = self
        native: Any = super()
        native.set_lora(index, lora_a, lora_b)
        if bool((lora_b != 0).any()):
            layer.occupied.add(index)


class OccupiedEmbedding(Occupied):
    """The same for an embedding, which is in the part of the model that the engine may compile."""

    key: str

    def forward(self, x: Tensor) -> Tensor:
        if not is_forward_context_available():  # embeddings that the engine makes ahead of a step
            return self.embed(x)
        base: Any = self.base_layer  # type: ignore[attr-defined]
        return opaque.embed(x, base.embedding_dim, base.weight.dtype, self.key)

    def embed(self, ids: Tensor) -> Tensor:
        """The embedding of ``ids`` with the adapters' part."""
        native: Any = super()
        found: Tensor = native.forward(ids)
        return found


def derive(mixin: type, native: type) -> type:
    """``native`` with ``mixin`` before it, under its own name, which the engine compares in places."""
    return type(native.__name__, (mixin, native), {"__module__": __name__, "__doc__": native.__doc__})


def _shared(piece: int, buffer: Tensor) -> Tensor:
    """One buffer for all layers whose slice ``piece`` has the shape of ``buffer``."""
    key = (piece, buffer.shape, buffer.dtype, buffer.device)
    return _SCRATCH.setdefault(key, torch.zeros_like(buffer))
