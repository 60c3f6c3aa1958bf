"""The engine's memory pool, with live directions in a pool of ours instead of buffers of the largest rank.

Slots, eviction and pinning remain the engine's. Modules that stay native keep the engine's buffers and loader.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.lora.layers import BaseLayerWithLoRA
from sglang.srt.lora.mem_pool import LoRAMemoryPool
from sglang.srt.lora.utils import LoRAType
from torch import Tensor

import loraforge
from loraforge.errors import LoraForgeError
from loraforge.runtime import counters
from loraforge.runtime.packed import Packed
from loraforge.runtime.pools import make_pool, require_room
from loraforge.runtime.ranks import Factors
from loraforge.runtime.sglang.adapter import PackedAdapter, require_packed
from loraforge.runtime.sglang.backend import LoRAForgeBackend
from loraforge.runtime.sglang.counted import native_bytes
from loraforge.runtime.sglang.options import POOL_BYTES
from loraforge.runtime.sglang.projections import DTYPES, Key, Served, find
from loraforge.runtime.sglang.version import require

logger = logging.getLogger("sglang.loraforge")


class LiveMemoryPool(LoRAMemoryPool):
    """served: layers that ``pool`` serves. pool: live directions of the adapters in slots."""

    served: Mapping[Key, Served]
    target_modules: set[str]

    def init_buffers(self, base_model: Any) -> None:
        layers = [module for module in base_model.modules() if isinstance(module, BaseLayerWithLoRA)]
        backends = {id(layer.lora_backend): layer.lora_backend for layer in layers}
        if len(backends) != 1 or not isinstance(backend := next(iter(backends.values())), LoRAForgeBackend):
            raise LoraForgeError(
                f"{len(backends)} LoRA backends in one model",
                key="lora_backend",
                remedy="serve with --lora-backend loraforge alone",
            )
        self.backend = backend
        targets = self.target_modules
        self.served = find(base_model, targets) if self.dtype in DTYPES else {}
        if not self.served:
            raise LoraForgeError(
                f"none of {len(layers)} LoRA layers can be served in {self.dtype}",
                key=type(base_model).__name__,
                remedy="serve this model with --lora-backend csgmv",
            )
        self.served_targets = {target for _, target in self.served}
        # the engine makes buffers for the others alone
        self.target_modules = targets - self.served_targets
        self.native = bool(self.target_modules)
        super().init_buffers(base_model)
        self.target_modules = targets
        self._stand_ins = {
            key: (
                self._stand_in(self.get_lora_A_shape, base_model, key),
                self._stand_in(self.get_lora_B_shape, base_model, key),
            )
            for key in self.served
        }
        self._names = {served.projection.name for served in self.served.values()}
        options = backend.options
        self.pool = make_pool(
            options.pool,
            (served.projection for served in self.served.values()),
            self.max_loras_per_batch,
            self.max_lora_rank,
            options.pool_bytes,
            self.dtype,
            backend.device,
        )
        self._footprints: WeakKeyDictionary[PackedAdapter, int] = WeakKeyDictionary()
        self._changed: Any = None  # stream of the last change, None on a CPU
        backend.attach(self, self._stand_ins)
        logger.info(
            "LoRAForge %s is active in %s: %d of %d LoRA layers from a %s pool of at most %d bytes, %d slots, %s",
            *(loraforge.__version__, f"sglang {require()}", len(self.served), len(layers), options.pool),
            *(self.pool.capacity_bytes, self.max_loras_per_batch, backend.instructions),
        )
        self._publish()

    def get_tensor(self, target_module: str, layer_id: int, lora_type: LoRAType) -> Tensor:
        stand_ins = self._stand_ins.get((layer_id, target_module))
        if stand_ins is None:
            native: Tensor = super().get_tensor(target_module, layer_id, lora_type)
            return native
        return stand_ins[lora_type is LoRAType.LORA_B]

    def register(self, adapter: PackedAdapter, factors: Mapping[str, Sequence[Factors | None]]) -> Packed:
        """Pack a new adapter. Raises LoraForgeError where it does not fit beside the largest others."""
        ranks = [len(pair[0]) for slices in factors.values() for pair in slices if pair is not None]
        if max(ranks, default=0) > self.max_lora_rank:
            raise LoraForgeError(
                f"rank {max(ranks)} is more than the server's largest, {self.max_lora_rank}",
                key=str(adapter.config.path or adapter.uid),
                remedy="start it with a larger --max-lora-rank",
            )
        packed = self.pool.pack(factors)
        footprints: dict[object, int] = {
            **dict(self._footprints),
            adapter: self.pool.size(packed),
        }
        name = str(adapter.config.path or adapter.uid)
        named = {name if one is adapter else one: size for one, size in footprints.items()}
        require_room(self.pool, named, name, key=POOL_BYTES, flag="--max-loras-per-batch")
        self._footprints[adapter] = self.pool.size(packed)
        return packed

    def prepare_lora_batch(
        self, cur_uids: Any, lora_adapters: Mapping[str, PackedAdapter], *args: Any, **kwargs: Any
    ) -> None:
        for adapter in lora_adapters.values():
            if adapter.packed is None:  # read before there was a pool
                adapter.adopt()
        super().prepare_lora_batch(cur_uids, lora_adapters, *args, **kwargs)

    def load_lora_weight_to_buffer(
        self,
        uid: str | None,
        buffer_id: int,
        lora_adapter: PackedAdapter,
        lora_modules: Sequence[Mapping[str, Any]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if self.native or uid is None:  # the base model's slot is cleared, which clears ours
            others = [
                {name: module for name, module in layer.items() if name not in self._names}
                for layer in lora_modules
            ]
            super().load_lora_weight_to_buffer(uid, buffer_id, lora_adapter, others, *args, **kwargs)
        if uid is not None:
            with self._in_order():
                self.pool.load(buffer_id, require_packed(lora_adapter))
            self._publish()

    def _clear_buffer_slot_for_base(self, buffer_id: int) -> None:
        super()._clear_buffer_slot_for_base(buffer_id)
        with self._in_order():
            self.pool.clear(buffer_id)
        self._publish()

    def _stand_in(self, shape: Any, base_model: Any, key: Key) -> Tensor:
        """What the engine's layer holds for its buffer: of its shape, of the memory of one element, at an address that
        tells which layer asks."""
        layer, target = key
        element = torch.zeros(1, dtype=self.dtype, device=self.backend.device)
        return element.expand(shape(target, base_model, self.max_lora_rank, layer))

    @contextmanager
    def _in_order(self) -> Iterator[None]:
        """Changes of the pool, on whatever stream the engine makes them, after those before and after the steps that
        were launched; steps that are launched later come after them where other slots have been moved. (Of the slot
        that is filled, the engine itself sees to that.)"""
        steps = self.backend.stream
        if steps is None:  # nothing has run yet, or never on a stream
            yield
            return
        here = torch.cuda.current_stream(self.backend.device)
        for before in (steps, self._changed):
            if before is not None and before != here:
                here.wait_stream(before)
        self._changed = here
        moves = self.pool.counters.moves
        yield
        if here != steps and self.pool.counters.moves != moves:
            steps.wait_stream(here)

    def _publish(self) -> None:
        if self.tp_rank or not counters.wanted():
            return
        gpu = torch.device(self.backend.device).type == "cuda"
        counters.publish(
            {
                "execution": "loraforge",
                "pool": self.backend.options.pool,
                **self.pool.report(),
                "lora_bytes": self.pool.device_bytes + self.backend.device_bytes + native_bytes(self),
                "peak_allocated_bytes": torch.cuda.max_memory_allocated(self.backend.device) if gpu else None,
            }
        )
