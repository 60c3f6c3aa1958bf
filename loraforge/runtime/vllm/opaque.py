"""What a LoRA layer does, as torch custom ops, so that the engine may compile the model around it.

The ops name a layer by a handle, an integer in a tensor on the host: compiled code, which outlives a process in the
engine's cache, takes it as one of its inputs. A name would be a constant of the graph, so that no two layers would
share what was compiled and the engine would start several times more slowly; and of the adapters, which change between
steps, compiled code must see nothing at all.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_LIBRARY: Any = torch.library.Library("loraforge_vllm", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("update(Tensor x, Tensor(y!) y, Tensor layer) -> ()")
_LIBRARY.define("embed(Tensor ids, Tensor layer, int width, ScalarType dtype) -> Tensor")

_LAYERS: WeakValueDictionary[int, Any] = WeakValueDictionary()
_NUMBERS = count()


def handle(layer: Any) -> Tensor:
    """int64 [1] on the host: what the ops know ``layer`` by, as long as it lives."""
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    return torch.tensor([number], dtype=torch.int64)


def update(x: Tensor, y: Tensor, layer: Tensor) -> None:
    """``y`` += the adapters' part for ``x``, by ``update(y, x)`` of the layer with this handle."""
    torch.ops.loraforge_vllm.update(x, y, layer)


def embed(ids: Tensor, layer: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """[*ids.shape, width], by ``embed(ids)`` of the layer with this handle: base embedding and adapters."""
    result: Tensor = torch.ops.loraforge_vllm.embed(ids, layer, width, dtype)
    return result


def _update(x: Tensor, y: Tensor, layer: Tensor) -> None:
    _LAYERS[int(layer)].update(y, x)


def _embed(ids: Tensor, layer: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    found: Tensor = _LAYERS[int(layer)].embed(ids)
    return found


def _embed_fake(ids: Tensor, layer: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    return ids.new_empty((*ids.shape, width), dtype=dtype)


for _name, _call, _fake in (("update", _update, lambda *_: None), ("embed", _embed, _embed_fake)):
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _call, _device)
    torch.library.register_fake(f"loraforge_vllm::{_name}", _fake, lib=_LIBRARY)
