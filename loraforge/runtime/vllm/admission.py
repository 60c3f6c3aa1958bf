"""What an adapter must be before the engine registers it.

The engine's own loader accepts factors that are too narrow (they go into the first columns of its buffers), layers that
the model does not have, and values that are not finite, which would spread through the shared KV cache into the
answers of every other request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from vllm.lora import utils

from loraforge.errors import InputError
from loraforge.fleet.peft_io import open_adapter
from loraforge.runtime.ranks import check_manifest, live_rank
from loraforge.runtime.vllm.layers import PooledLinear

# what the engine's loader lets through of a damaged file; what it says itself is clear
_UNEXPLAINED = (SafetensorError, json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError)
_OTHER_BASE = "load an adapter of this base model"


def checked(load: Any) -> Any:
    """The engine's loader of adapters, which then refuses one that cannot be served as it is meant."""

    def load_adapter(self: Any, lora_request: Any) -> Any:
        folder = Path(utils.get_adapter_absolute_path(lora_request.lora_path))
        try:
            lora = load(self, lora_request)
        except _UNEXPLAINED:
            open_adapter(folder)  # says which file it is, and what of it
            raise
        check_tensors(folder, lora.loras)
        check_layers(folder, lora.loras, self._adapter_manager)
        ranks = {
            name: live_rank(weights.lora_a, weights.lora_b)
            for name, weights in lora.loras.items()
            if not weights.is_packed
        }
        check_manifest(folder, ranks)
        return lora

    return load_adapter


def check_tensors(folder: Path, loras: Any) -> None:
    """Raise InputError for no module at all, one with one factor of two, or with values that are not finite."""
    if not loras:
        raise InputError("has no tensor of a LoRA layer", path=folder, remedy="save the adapter again")
    for name, weights in loras.items():
        if weights.is_packed:
            continue
        for side, tensor in (("A", weights.lora_a), ("B", weights.lora_b)):
            if not hasattr(tensor, "isfinite"):  # the engine leaves what it did not find as it was made
                raise InputError(
                    f"has no lora_{side}",
                    path=folder,
                    key=name,
                    remedy="the file is incomplete: save it again",
                )
            if not _is_finite(tensor):
                raise InputError(
                    f"lora_{side} holds NaN or infinite values",
                    path=folder,
                    key=name,
                    remedy="the training run diverged, or the file is damaged: leave this adapter out",
                )


def _is_finite(tensor: Any) -> bool:
    """Whether all values are finite. Their extremes tell, in one pass and without memory: asking every value takes
    five times as long, seconds for a large adapter, while the engine serves nobody."""
    return not tensor.numel() or all(bool(extreme.isfinite()) for extreme in tensor.aminmax())


def check_layers(folder: Path, loras: Any, manager: Any) -> None:
    """Raise InputError for a module that the model lacks, whose layer has another shape, or whose rank is too large."""
    shapes = dict(_shapes(manager))
    kinds = {name.rpartition(".")[2] for name in shapes}
    whole = manager.lora_config.target_modules is None and manager.whole_model
    most: int = manager.lora_config.max_lora_rank
    for name, weights in loras.items():
        if weights.is_packed:
            continue
        if (rank := weights.lora_a.shape[0]) > most or rank != weights.lora_b.shape[1]:
            raise InputError(
                f"lora_A has {rank} directions, lora_B {weights.lora_b.shape[1]}, the engine room for {most}",
                path=folder,
                key=name,
                remedy="raise --max-lora-rank, or save the adapter again",
            )
        if (shape := shapes.get(name)) is None:
            # what the engine leaves out on purpose is of another kind, or on another device
            if whole and name.rpartition(".")[2] in kinds:
                raise InputError("the model has no such layer", path=folder, key=name, remedy=_OTHER_BASE)
            continue
        found = (weights.lora_a.shape[1], weights.lora_b.shape[0])
        if found != shape:
            raise InputError(
                f"maps {found[0]} inputs to {found[1]} outputs, the model's layer {shape[0]} to {shape[1]}",
                path=folder,
                key=name,
                remedy=_OTHER_BASE,
            )


def _shapes(manager: Any) -> Iterator[tuple[str, tuple[int, int]]]:
    """(inputs, outputs) of every linear layer, whole where it is sharded, by its name and by those of its parts."""
    for name, layer in manager.modules.items():
        if not isinstance(layer, PooledLinear):
            continue
        base: Any = layer.base_layer  # type: ignore[attr-defined]
        outputs = _outputs(base)
        yield name, (base.input_size, sum(outputs))
        parts = manager.packed_modules.get(name, ())
        if len(parts) == len(outputs):
            yield from zip(parts, ((base.input_size, width) for width in outputs), strict=True)


def _outputs(base: Any) -> Sequence[int]:
    """Output channels of each part of a linear layer of the engine."""
    if hasattr(base, "total_num_kv_heads"):  # its output_sizes count the copies of a head on several devices
        kv = base.total_num_kv_heads
        return (base.total_num_heads * base.head_size, kv * base.head_size, kv * base.v_head_size)
    return tuple(getattr(base, "output_sizes", (base.output_size,)))
