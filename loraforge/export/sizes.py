"""The sizes of the weight files that an export would write, to the byte and without writing one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from loraforge.config import Layout
from loraforge.export.directions import Directions, Kept
from loraforge.export.layouts import module_ranks, shared_ranks
from loraforge.export.writer import METADATA, factor_tensors, kept_modules
from loraforge.fleet.peft_io import Adapter, LoraModule
from loraforge.tensor_file import DTYPES, file_bytes

_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


def weight_bytes(
    adapter: Adapter, ranks: Mapping[str, int], layouts: Sequence[Layout], dtype: torch.dtype | None
) -> dict[Layout, int]:
    """Bytes of adapter_model.safetensors by layout at ``ranks`` (k of every module), as ``dtype`` (None: each
    module's own)."""
    beside = _beside_the_factors(adapter)
    modules = kept_modules(adapter, ranks)
    kept = {module.name: _kept(module, ranks[module.name], dtype) for module in modules}
    directions = Directions(adapter, "", kept)
    shared = shared_ranks(modules, {module.name: ranks[module.name] for module in modules})
    return {
        layout: file_bytes(beside | factor_tensors(directions, module_ranks(layout, shared)), METADATA)
        for layout in layouts
    }


def _kept(module: LoraModule, k: int, dtype: torch.dtype | None) -> Kept:
    a, b = (_shape_only(shape, dtype or module.dtype) for shape in ((k, module.d_in), (module.d_out, k)))
    return Kept(a, b, 0.0, torch.empty(0).double().numpy(), "")


def _beside_the_factors(adapter: Adapter) -> dict[str, torch.Tensor]:
    stored = adapter.weights.tensors
    found: dict[str, torch.Tensor] = {}
    for name in adapter.passthrough:
        tensor = stored[adapter.stored_as.get(name, name)]
        found[name] = _shape_only(tensor.shape, _BY_NAME[tensor.dtype])
    for module in adapter.modules:
        if module.bias_name is not None and module.bias_key is not None:
            tensor = stored[module.bias_key]
            wide = torch.promote_types(_BY_NAME[tensor.dtype], torch.float32)
            found[module.bias_name] = _shape_only(tensor.shape, wide)
    return found


def _shape_only(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
