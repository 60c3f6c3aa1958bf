"""The engine's LoRA manager: makes the pool when the layers are known, and keeps it in step with the slots."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.logger import init_logger
from vllm.lora.model_manager import DEFAULT_LANGUAGE_WRAPPER_KEY

import loraforge
from loraforge.errors import LoraForgeError
from loraforge.runtime.batch import Applied
from loraforge.runtime.pool import Counters
from loraforge.runtime.pools import make_pool, require_room
from loraforge.runtime.vllm import opaque
from loraforge.runtime.vllm.counted import CountedModelManager, device_bytes
from loraforge.runtime.vllm.layers import Occupied, OccupiedEmbedding, PooledLinear
from loraforge.runtime.vllm.options import POOL_BYTES, Options
from loraforge.runtime.vllm.version import require

logger = init_logger("vllm.loraforge")  # the engine prints what is below its own name


class LoRAForgeModelManager(CountedModelManager):
    """Adapters live in the engine's slots, under its LRU rule; their live directions lie in ``pool``.

    An adapter is refused, when it is registered, if the pool could not hold it beside the largest others that the
    engine may want at once: no batch can then fail for want of room.
    """

    def __init__(self, *args: Any, vllm_config: Any, **kwargs: Any) -> None:
        self._options = Options.of(vllm_config)
        self._footprints: dict[int, int] = {}
        self.whole_model = vllm_config.parallel_config.pipeline_parallel_size == 1
        super().__init__(*args, vllm_config=vllm_config, **kwargs)

    def _init_punica_wrapper(self, max_num_batched_tokens: int, vllm_config: Any) -> None:
        super()._init_punica_wrapper(max_num_batched_tokens, vllm_config)
        for wrapper in {id(one): one for one in self.punica_wrapper_mapping.values()}.values():
            wrapper.prepare(self._options)

    def _create_lora_modules(self) -> None:
        super()._create_lora_modules()
        punica = self.punica_wrapper_mapping.get(DEFAULT_LANGUAGE_WRAPPER_KEY)
        self._layers: dict[str, Any] = {
            name: layer
            for name, layer in self.modules.items()
            if isinstance(layer, PooledLinear) and layer.pooled  # type: ignore[attr-defined]
        }
        if not self._layers or punica is None:
            raise LoraForgeError(
                f"{len(self._layers)} of {len(self.modules)} LoRA layers can be served",
                key=type(self.model).__name__,
                remedy="set LORAFORGE_VLLM=0 to serve this model without LoRAForge",
            )
        projections = {name: layer.projection(name) for name, layer in self._layers.items()}
        # before the engine measures how much memory is left for its cache
        config = self.lora_config
        self.pool = make_pool(
            self._options.pool,
            projections.values(),
            self.lora_slots,
            config.max_lora_rank,
            self._options.pool_bytes,
            config.lora_dtype,
            self.device,
        )
        for layer in self.modules.values():
            if isinstance(layer, PooledLinear | OccupiedEmbedding):
                layer.handle = opaque.handle(layer)
        alike: dict[Any, Applied] = {}  # layers of one name and shape run the same kernels
        for name, layer in self._layers.items():
            its = projections[name]
            applied = Applied(self.pool, punica.batch, its, punica.kernels)
            alike.setdefault((name.rpartition(".")[2], its.d_in, its.channels), applied)
            layer.serve(applied)
        for applied in alike.values():
            applied.warm()
        punica.native = any(
            name not in self._layers and not isinstance(layer, Occupied)
            for name, layer in self.modules.items()
        )
        logger.info(
            "LoRAForge %s is active in %s: %d of %d LoRA layers from a %s pool of at most %d bytes, %d slots, %s",
            *(loraforge.__version__, require(), len(self._layers), len(self.modules)),
            *(self._options.pool, self.pool.capacity_bytes, self.lora_slots, punica.instructions),
        )

    def _create_merged_loras_inplace(self, lora: Any) -> None:
        super()._create_merged_loras_inplace(lora)
        factors = {}
        for name, layer in self._layers.items():
            weights = self._get_lora_layer_weights(lora, name)
            if weights:
                factors[name] = layer.factors(weights.lora_a, weights.lora_b)
        lora.packed = self.pool.pack(factors)
        self._check_room(lora)
        for name in factors:  # what is packed is not kept twice
            weights = self._get_lora_layer_weights(lora, name)
            weights.lora_a = _nothing(weights.lora_a, 0)
            weights.lora_b = _nothing(weights.lora_b, 1)

    def _check_room(self, lora: Any) -> None:
        # of those too that left the engine's cache: a request brings them back in the middle of a step
        footprints = {**self._footprints, lora.id: self.pool.size(lora.packed)}
        require_room(self.pool, footprints, lora.id, key=POOL_BYTES, flag="--max-loras")
        self._footprints = footprints

    def list_adapters(self) -> Any:
        """The registered adapters by id: what holds them, since the engine asks once a request and step, takes the ids
        alone, and its own copy of fifty takes longer than all else that a request needs."""
        return self._registered_adapters

    def remove_adapter(self, adapter_id: int) -> bool:
        self._footprints.pop(adapter_id, None)
        removed: bool = super().remove_adapter(adapter_id)
        return removed

    def put(self, slot: int, adapter: Any) -> None:
        self.pool.load(slot, adapter.packed)

    def empty(self, slot: int) -> None:
        self.pool.clear(slot)

    def restart(self) -> None:
        self.pool.counters = Counters()
        self._footprints.clear()

    def counts(self) -> dict[str, int | str | None]:
        batches = {id(one): one.batch for one in self.punica_wrapper_mapping.values()}.values()
        held = self.pool.device_bytes + sum(batch.device_bytes for batch in batches)
        return {
            "execution": "loraforge",
            "pool": self._options.pool,
            **self.pool.report(),
            "lora_bytes": held + device_bytes(self.modules.values()),
        }


def _nothing(factor: Any, rank_axis: int) -> Any:
    """A factor, or those of a fused group, with no direction left."""
    if isinstance(factor, list):
        return [None if one is None else _nothing(one, rank_axis) for one in factor]
    empty: Tensor = factor.narrow(rank_axis, 0, 0).clone()
    return empty
