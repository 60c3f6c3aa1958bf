"""The engine's LoRA layers, their factors in the pool instead of buffers of the largest rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context, is_forward_context_available

from loraforge.ops.slots import MAX_SLICES, VECTOR
from loraforge.runtime.batch import Applied
from loraforge.runtime.ranks import Factors, Projection, trim
from loraforge.runtime.vllm import opaque

DTYPES = (torch.bfloat16, torch.float16)  # that the kernels take


class _Sink:
    """Stands where the engine has a buffer of slots: of its shape, but without memory; keeps what is copied in."""

    def __init__(self, like: Tensor) -> None:
        self.shape, self.dtype, self.device = like.shape, like.dtype, like.device
        self.taken: Tensor | None = None

    def __getitem__(self, _: Any) -> _Sink:
        return self

    def __setitem__(self, _: Any, value: float) -> None:
        self.taken = None  # the engine empties a slot before it fills it

    def copy_(self, source: Tensor, non_blocking: bool = False) -> None:
        self.taken = source


class PooledLinear:
    """Goes before one of the engine's linear LoRA layers.

    The engine's own code still takes an adapter apart (fused slices, shards), but what it would copy into its buffers
    is handed on to the pool, and there are no such buffers. A layer that the kernels cannot serve keeps the engine's
    buffers and path.
    """

    handle: Tensor  # of this layer in the ops; set by the manager

    def create_lora_weights(self, max_loras: int, lora_config: Any, model_config: Any = None) -> None:
        layer: Any = self
        layer.pooled = (
            lora_config.lora_dtype in DTYPES
            and layer.n_slices <= MAX_SLICES
            and not lora_config.fully_sharded_loras
            and layer.input_size % VECTOR == 0
        )
        native: Any = super()
        native.create_lora_weights(1 if layer.pooled else max_loras, lora_config, model_config)
        if layer.pooled:
            layer.lora_a_stacked = tuple(map(_Sink, layer.lora_a_stacked))
            layer.lora_b_stacked = tuple(map(_Sink, layer.lora_b_stacked))
            layer._enable_aux_cuda_stream = False  # a second stream would go round the pool

    def projection(self, name: str) -> Projection:
        """What the pool has to know of this layer."""
        layer: Any = self
        return Projection(
            name, layer.lora_a_stacked[0].shape[-1], tuple(b.shape[-2] for b in layer.lora_b_stacked)
        )

    def serve(self, applied: Applied) -> None:
        """Run ``applied`` from now on."""
        layer: Any = self
        layer.applied = applied

    def factors(self, lora_a: Any, lora_b: Any) -> list[Factors | None]:
        """What this layer takes of an adapter, live directions of each slice: views of the engine's tensors."""
        layer: Any = self
        native: Any = super()
        native.set_lora(0, lora_a, lora_b)
        pairs = [(a.taken, b.taken) for a, b in zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True)]
        native.reset_lora(0)
        return [None if a is None or b is None else trim(a, b) for a, b in pairs]

    def reset_lora(self, index: int) -> None:
        layer: Any = self
        native: Any = super()
        if not layer.pooled:
            native.reset_lora(index)

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        """Nothing where the pool serves: the manager puts whole adapters into it."""
        layer: Any = self
        native: Any = super()
        if not layer.pooled:
            native.set_lora(index, lora_a, lora_b)

    def _apply_lora_to_output(self, x: Tensor, output: Tensor) -> Tensor:
        opaque.update(x, output, self.handle)
        return output

    def update(self, y: Tensor, x: Tensor) -> None:
        """Add the adapters' part to the base layer's output ``y`` [..., channels], for its input ``x`` [..., d_in]."""
        layer: Any = self
        y, x = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
        if layer.pooled:
            # the engine makes a new context for each forward pass
            step = get_forward_context() if is_forward_context_available() else None
            layer.applied.add(y, x, step)
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

    handle: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not is_forward_context_available():  # embeddings that the engine makes ahead of a step
            return self.embed(x)
        base: Any = self.base_layer  # type: ignore[attr-defined]
        return opaque.embed(x, self.handle, base.embedding_dim, base.weight.dtype)

    def embed(self, ids: Tensor) -> Tensor:
        """The embedding of ``ids`` with the adapters' part."""
        layer: Any = self
        native: Any = super()
        if not layer.punica_wrapper.batch.active:
            base: Tensor = layer.base_layer.forward(ids)
            return base
        found: Tensor = native.forward(ids)
        return found


def derive(mixin: type, native: type) -> type:
    """``native`` with ``mixin`` before it, under its own name, which the engine compares in places."""
    return type(native.__name__, (mixin, native), {"__module__": __name__, "__doc__": native.__doc__})
