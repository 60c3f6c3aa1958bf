"""Adapters that no engine may serve, made of one that it may."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def copy(source: Path, folder: Path, change: Callable[[Tensors], Tensors] = lambda tensors: tensors) -> Path:
    """An adapter with other tensors."""
    shutil.copytree(source, folder)
    file = folder / "adapter_model.safetensors"
    changed = {name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}
    save_file(changed, file, metadata={"format": "pt"})
    return folder


def sized(width: int) -> Callable[[Tensors], Tensors]:
    """Factors for another hidden size, which is that of inputs and outputs alike here."""

    def change(tensors: Tensors) -> Tensors:
        made = {}
        for name, tensor in tensors.items():
            rows, columns = tensor.shape
            shape = (rows, width) if ".lora_A." in name else (width, columns)
            made[name] = torch.ones(shape, dtype=tensor.dtype) / 1000
        return made

    return change


def not_finite(tensors: Tensors) -> Tensors:
    first = min(tensors)
    return {**tensors, first: tensors[first] * float("nan")}


def half_a_pair(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if ".2.self_attn.q_proj.lora_B" not in name}


def deeper(tensors: Tensors) -> Tensors:
    first = {name: tensor for name, tensor in tensors.items() if ".layers.0." in name}
    return tensors | {name.replace(".0.", ".40."): tensor.clone() for name, tensor in first.items()}


def repeated(tensors: Tensors) -> Tensors:
    return {name: torch.cat([tensor] * 16, int(".lora_B." in name)) for name, tensor in tensors.items()}


def truncated(source: Path, folder: Path) -> Path:
    file = copy(source, folder) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    return folder


def no_json(source: Path, folder: Path) -> Path:
    (copy(source, folder) / "adapter_config.json").write_text("{r: 16}")
    return folder
