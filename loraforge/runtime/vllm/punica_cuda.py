"""The engine's LoRA batch on a GPU: begins each step, and keeps the engine's own metadata while a layer needs it.

The engine sorts the tokens of a step on the device and waits for the result three times. The pool's layers need none of
that: their plan is made inside the forward pass from the slots of the tokens, which are one small copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

from loraforge.ops.plan import BASE
from loraforge.runtime.batch import Batch
from loraforge.runtime.kernels import Kernels
from loraforge.runtime.vllm.options import Options


class PunicaWrapperLoRAForge(PunicaWrapperGPU):
    """While no adapter needs a native layer, the engine's metadata says that no token has an adapter: kernels that a
    captured graph holds then end at once."""

    def __init__(self, max_num_batched_tokens: int, max_batches: int, device: Any, **kwargs: Any) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        self._tokens, self._requests = max_num_batched_tokens, max_batches
        self.native = (
            False  # whether a layer needs the engine's metadata whatever is loaded; set by the manager
        )
        self._occupied: dict[int, Set[int]] = {}
        self._embeddings_indices.zero_()  # read by a captured graph before the engine first writes them
        self._native_live = True
        self._forget_native()

    def prepare(self, options: Options) -> None:
        """Make the buffers of a step, and look up the kernels of this device."""
        config = self.lora_config
        self.kernels = Kernels.of(self.device, self._requests, options.ranks, config.max_lora_rank)
        self.batch = Batch(
            self._tokens,
            config.max_loras,
            config.max_lora_rank,
            self.device,
            tiles=self.kernels.tiles(),
            planes=self.kernels.planes(self._tokens),
        )

    @property
    def instructions(self) -> str:
        """What the products run on."""
        return f"kernels chosen for {self.kernels.source}"

    def watch(self, lora_b_stacked: Tensor, slots: Set[int]) -> None:
        """A native layer, known by its B, needs the engine's metadata while ``slots`` is not empty."""
        self._occupied[lora_b_stacked.data_ptr()] = slots

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], *args: Any, **kwargs: Any
    ) -> None:
        slots = _slots(mapping.index_mapping, lora_index_to_id)
        self.batch.set(torch.from_numpy(slots), active=bool((slots != BASE).any()))
        if self.native or any(self._occupied.values()):
            super().update_metadata(mapping, lora_index_to_id, *args, **kwargs)
            self._native_live = True
        else:
            self._forget_native()

    def add_lora_logits(
        self, y: Tensor, x: Tensor, lora_a_stacked: Tensor, lora_b_stacked: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        # never captured, so this may be decided here
        slots = self._occupied.get(lora_b_stacked.data_ptr())
        if self.batch.active and (slots is None or slots):
            super().add_lora_logits(y, x, lora_a_stacked, lora_b_stacked, *args, **kwargs)

    def _forget_native(self) -> None:
        if self._native_live:
            for meta in (self.token_mapping_meta, self.prompt_mapping_meta):
                meta._reset()
                # a graph keeps the grid that it is captured with, which must have room for adapters that come later
                meta.num_active_loras_cpu.fill_(self.max_loras + 1)
            self._native_live = False


def _slots(token_ids: tuple[int, ...], slot_ids: list[int | None]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """int32 [T]: the slot of each token, from the id of its adapter, 0 for none, and the ids in the slots."""
    ids = np.asarray(token_ids, dtype=np.int64)
    known: Mapping[int, int] = {id_: slot for slot, id_ in enumerate(slot_ids) if id_ is not None}
    distinct, places = np.unique(ids, return_inverse=True)
    of = np.array([known[id_] if id_ > 0 else BASE for id_ in distinct.tolist()], dtype=np.int32)
    return of[places]
