"""What a LoRA layer does, as torch custom ops, so that the engine may compile the model around it.

The ops name a layer, and find it through the engine's forward context, as the engine's own opaque layers do: which
adapters lie where changes between steps, and compiled code, which outlives a process in the engine's cache, must see
none of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context

_LIBRARY: Any = torch.library.Library("loraforge_vllm", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("update(Tensor x, Tensor(y!) y, str layer) -> ()")
_LIBRARY.define("embed(Tensor ids, int width, ScalarType dtype, str layer) -> Tensor")


def key(name: str) -> str:
    """A module's name as a key of the engine's ``static_forward_context``."""
    return f"{name}.loraforge"


def update(x: Tensor, y: Tensor, layer: str) -> None:
    """``y`` += the adapters' part for ``x``, by ``update(y, x)`` of the layer with this key."""
    torch.ops.loraforge_vllm.update(x, y, layer)


def embed(ids: Tensor, width: int, dtype: torch.dtype, layer: str) -> Tensor:
    """[*ids.shape, width], by ``embed(ids)`` of the layer with this key: base embedding and adapters."""
    result: Tensor = torch.ops.loraforge_vllm.embed(ids, width, dtype, layer)
    return result


def _update(x: Tensor, y: Tensor, layer: str) -> None:
    get_forward_context().no_compile_layers[layer].update(y, x)


def _embed(ids: Tensor, width: int, dtype: torch.dtype, layer: str) -> Tensor:
    found: Tensor = get_forward_context().no_compile_layers[layer].embed(ids)
    return found


def _embed_fake(ids: Tensor, width: int, dtype: torch.dtype, layer: str) -> Tensor:
    return ids.new_empty((*ids.shape, width), dtype=dtype)


for _name, _call, _fake in (("update", _update, lambda *_: None), ("embed", _embed, _embed_fake)):
    _LIBRARY.impl(_name, _call, "CPU")
    torch.library.register_fake(f"loraforge_vllm::{_name}", _fake, lib=_LIBRARY)
