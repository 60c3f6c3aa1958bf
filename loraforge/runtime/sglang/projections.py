"""Which of the engine's LoRA layers the pool serves, and what of an adapter each of them takes.

The engine's layers know which part of a factor is this process's under tensor parallelism; they are asked with the
numbers of rows and columns instead of weights, so that ranks that differ within a fused group do not matter to them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.distributed.utils import get_group_rank_size
from sglang.srt.layers.utils import get_layer_id
from sglang.srt.lora.layers import (
    BaseLayerWithLoRA,
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
    RowParallelLinearWithLoRA,
)
from sglang.srt.lora.utils import get_stacked_multiply, get_target_module_name
from torch import Tensor

from loraforge.errors import InputError
from loraforge.ops.slots import VECTOR
from loraforge.runtime.ranks import Factors, Projection, trim
from loraforge.runtime.sglang.modules import FUSED, Pair

DTYPES = (torch.bfloat16, torch.float16)  # that the kernels take
ABSORBED = ("kv_b_proj",)  # that attention reads the engine's buffers of, round the layer itself (MLA)
Key = tuple[int, str]  # layer, target module: what the engine's buffers are known by
Range = tuple[int, int]


@dataclass(frozen=True)
class Served:
    """One layer.

    projection: this process's part of it. inputs, outputs: the whole layer's, of each slice. columns, rows: where this
    process's part of A and of each slice's B begins and ends. reduced: whether Z may be summed over processes.
    """

    projection: Projection
    inputs: int
    outputs: tuple[int, ...]
    columns: Range
    rows: tuple[Range, ...]
    reduced: bool

    def factors(self, parts: Mapping[int | None, Pair]) -> list[Factors | None]:
        """What this process takes of an adapter, live directions of each slice.

        parts: slice -> factors; None for those of all slices in one. Raises InputError where they are of another shape.
        """
        slices: list[Factors | None] = [None] * len(self.outputs)
        for place, pair in parts.items():
            outputs = sum(self.outputs) if place is None else self.outputs[place]
            if (pair.a.shape[1], pair.b.shape[0]) != (self.inputs, outputs):
                raise InputError(
                    f"maps {pair.a.shape[1]} inputs to {pair.b.shape[0]} outputs, the model's layer {self.inputs} "
                    f"to {outputs}",
                    key=pair.module,
                    remedy="load an adapter of this base model",
                )
            wholes = [pair.b] if place is not None else list(torch.split(pair.b, list(self.outputs)))
            for number, b in enumerate(wholes, place or 0):
                slices[number] = trim(pair.a[:, slice(*self.columns)], b[slice(*self.rows[number])])
        return slices


def find(model: Any, targets: Collection[str]) -> dict[Key, Served]:
    """The layers of a model, wrapped by the engine, that the pool serves: all layers of a target module, or none."""
    names = set(targets)
    modules: dict[str, dict[Key, list[tuple[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for name, module in model.named_modules():
        layer = get_layer_id(name)
        if isinstance(module, BaseLayerWithLoRA) and layer is not None:
            target = get_target_module_name(name, names)
            modules[target][layer, target].append((name, module))
    found: dict[Key, Served] = {}
    for target, its in modules.items():
        layers = {key: _describe(*alike[0], model, target) for key, alike in its.items() if len(alike) == 1}
        if len(layers) == len(its) and all(layers.values()):
            found |= {key: served for key, served in layers.items() if served is not None}
    return found


def _describe(name: str, module: Any, model: Any, target: str) -> Served | None:
    """None for a layer that stays the engine's own."""
    base = module.base_layer
    kind = type(module)
    if name.rpartition(".")[2] != target or target in ABSORBED:
        return None
    if kind is QKVParallelLinearWithLoRA:
        kv = base.total_num_kv_heads * base.head_size
        outputs: tuple[int, ...] = (base.total_num_heads * base.head_size, kv, kv)
        channels: tuple[int, ...] = (
            base.q_proj_shard_size,
            base.kv_proj_shard_size,
            base.kv_proj_shard_size,
        )
    elif kind is MergedColumnParallelLinearWithLoRA:
        outputs, channels = tuple(base.output_sizes), tuple(base.output_partition_sizes)
    elif kind is ColumnParallelLinearWithLoRA:
        outputs, channels = (base.output_size,), (base.output_partition_sizes[0],)
    elif kind is RowParallelLinearWithLoRA:
        outputs = channels = (base.output_size,)
    else:
        return None
    slices = get_stacked_multiply(target, model)
    if len(outputs) != slices or slices != len(FUSED.get(target, (target,))):
        return None
    columns = _range(module.slice_lora_a_weights(torch.arange(base.input_size)[None]).flatten())
    rows = []
    numbers = module.slice_lora_b_weights(torch.arange(sum(outputs))[:, None]).flatten()
    for place, part in enumerate(torch.split(numbers, list(channels))):
        rows.append(_range(part - sum(outputs[:place])))
    if columns is None or None in rows or (columns[1] - columns[0]) % VECTOR:
        return None
    return Served(
        Projection(name, columns[1] - columns[0], channels),
        base.input_size,
        outputs,
        columns,
        tuple(row for row in rows if row is not None),
        kind is RowParallelLinearWithLoRA and get_group_rank_size(base.tp_group)[1] > 1,
    )


def _range(numbers: Tensor) -> Range | None:
    """(first, end) of consecutive numbers; None where they are not."""
    first = int(numbers[0])
    if torch.equal(numbers, torch.arange(first, first + len(numbers))):
        return first, first + len(numbers)
    return None
