"""The engine's LoRA batch on a CPU: begins each step, and runs native products for the layers that stay native."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from loraforge.ops.cpu import native
from loraforge.runtime.batch import Batch
from loraforge.runtime.vllm.options import Options


class PunicaWrapperLoRAForge(PunicaWrapperCPU):
    """The native products write over rows of the base model (their slot, -1, is taken from the end): such rows are
    put back here, bit for bit."""

    kernels = None  # a CPU has one
    native = False

    def __init__(self, max_num_batched_tokens: int, max_batches: int, device: Any, **kwargs: Any) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        self._tokens = max_num_batched_tokens
        self._config = kwargs["lora_config"]
        self._occupied: dict[int, Set[int]] = {}

    def prepare(self, options: Options) -> None:
        """Make the buffers of a step."""
        self.batch = Batch(self._tokens, self._config.max_loras, self._config.max_lora_rank, self.device)

    @property
    def instructions(self) -> str:
        """What the products run on."""
        return native.instructions()

    def watch(self, lora_b_stacked: Tensor, slots: Set[int]) -> None:
        """Skip the products of a native layer, known by its B, while ``slots`` is empty."""
        self._occupied[lora_b_stacked.data_ptr()] = slots

    def update_metadata(self, mapping: Any, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(mapping, *args, **kwargs)
        self.batch.set(self.token_lora_indices, active=any(index > 0 for index in mapping.index_mapping))

    def add_lora_linear(self, y: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.batch.active:
            base = self.token_lora_indices < 0
            kept = y[: len(base)][base]
            super().add_lora_linear(y, *args, **kwargs)
            y[: len(base)][base] = kept

    def add_lora_embedding(
        self, y: Tensor, x: Tensor, lora_b_stacked: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        if self._used(lora_b_stacked):
            base = self.token_lora_indices < 0
            kept = y[: len(base)][base]
            super().add_lora_embedding(y, x, lora_b_stacked, *args, **kwargs)
            y[: len(base)][base] = kept

    def add_lora_logits(
        self, y: Tensor, x: Tensor, lora_a_stacked: Tensor, lora_b_stacked: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        if self._used(lora_b_stacked):
            base = self.sampler_indices < 0
            kept = y[base]
            super().add_lora_logits(y, x, lora_a_stacked, lora_b_stacked, *args, **kwargs)
            y[base] = kept

    def _used(self, lora_b_stacked: Tensor) -> bool:
        slots = self._occupied.get(lora_b_stacked.data_ptr())
        return self.batch.active and (slots is None or bool(slots))
