"""Real PEFT adapters on disk, as small as a test likes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file

# (d_out, d_in) of one tiny Llama-like layer
TINY_SHAPES = {
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (48, 32),
    "mlp.up_proj": (48, 32),
    "mlp.down_proj": (32, 48),
}


SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class MakeAdapter(Protocol):
    """``make_adapter(folder, r=4, targets=(...), ...)`` writes a PEFT adapter folder and returns its path."""

    def __call__(
        self,
        path: Path,
        *,
        r: int = 4,
        lora_alpha: float = 8,
        targets: Sequence[str] = ("q_proj", "v_proj"),
        layers: Sequence[int] = (0, 1),
        base: str = "tiny/base",
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        decay: float = 0.7,
        zero_b: bool = False,
        shapes: Mapping[str, tuple[int, int]] = TINY_SHAPES,
        extra: Mapping[str, torch.Tensor] | None = None,
        **config: Any,
    ) -> Path: ...


def write_adapter(
    path: Path,
    *,
    r: int = 4,
    lora_alpha: float = 8,
    targets: Sequence[str] = ("q_proj", "v_proj"),
    layers: Sequence[int] = (0, 1),
    base: str = "tiny/base",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    decay: float = 0.7,
    zero_b: bool = False,
    shapes: Mapping[str, tuple[int, int]] = TINY_SHAPES,
    extra: Mapping[str, torch.Tensor] | None = None,
    **config: Any,
) -> Path:
    """Write one adapter with random factors; column j of B is scaled by ``decay**j``, so that spectra fall.

    ``targets`` are tails of module names; ``config`` adds or replaces keys of adapter_config.json
    (``rank_pattern`` is honoured, by PEFT's rule); ``extra`` adds tensors under their full keys.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = dict(extra or {})
    for layer in layers:
        for tail, (d_out, d_in) in shapes.items():
            if tail.rpartition(".")[2] not in targets:
                continue
            name = f"model.layers.{layer}.{tail}"
            rank = r
            for pattern, value in config.get("rank_pattern", {}).items():
                if re.match(rf"(.*\.)?({pattern})$", name):
                    rank = value
                    break
            a = torch.randn(rank, d_in, generator=generator) / d_in**0.5
            b = torch.randn(d_out, rank, generator=generator) * decay ** torch.arange(rank)
            tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(dtype)
            tensors[f"base_model.model.{name}.lora_B.weight"] = (b * (not zero_b)).to(dtype)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    stored = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": r,
        "lora_alpha": lora_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "target_modules": list(targets),
        "rank_pattern": {},
        "alpha_pattern": {},
    } | config
    (path / "adapter_config.json").write_text(json.dumps(stored, indent=2))
    return path


def write_mixed_fleet(root: Path) -> Path:
    """Five adapters: ranks from one to the whole, four types, a zero update, and one tensor that is no factor."""
    write_adapter(root / "a", r=8, targets=SEVEN, dtype=torch.bfloat16)
    write_adapter(root / "b", r=4, lora_alpha=-6, seed=1, use_rslora=True)
    write_adapter(
        root / "c", r=16, seed=2, dtype=torch.float16, rank_pattern={"v_proj": 1}, modules_to_save=["lm_head"],
        extra={"base_model.model.lm_head.weight": torch.arange(12.0).reshape(3, 4)},
    )  # fmt: skip
    write_adapter(root / "d", r=4, seed=3, dtype=torch.float64)
    write_adapter(root / "e", r=4, seed=4, zero_b=True)
    return root
