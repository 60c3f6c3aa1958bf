"""How tensors of an adapter are told apart, and which are refused. Needs no engine."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from loraforge.errors import InputError
from loraforge.runtime.sglang.modules import Pair, missing, pairs, parse, place

PATH = Path("adapter")
ROOT = "base_model.model.model.layers.0"


def _pairs(tensors: dict[str, Tensor], rank: int = 2) -> dict[str, dict[int | None, Pair]]:
    return pairs(tensors, lambda _: rank, lambda module: 3.0 if module.endswith("v_proj") else 0.5, PATH)


def _module(name: str, rank: int = 2) -> dict[str, Tensor]:
    return {
        f"{ROOT}.{name}.lora_A.weight": torch.ones(rank, 8, dtype=torch.bfloat16),
        f"{ROOT}.{name}.lora_B.weight": torch.ones(16, rank, dtype=torch.bfloat16),
    }


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (f"{ROOT}.self_attn.q_proj.lora_A.weight", ("model.layers.0.self_attn.q_proj", "A")),
        (f"{ROOT}.mlp.up_proj.lora_B.default.weight", ("model.layers.0.mlp.up_proj", "B")),
        ("model.layers.3.o_proj.lora_B.weight", ("model.layers.3.o_proj", "B")),
        (f"{ROOT}.self_attn.q_proj.lora_magnitude_vector", None),
        (f"{ROOT}.self_attn.q_proj.bias", None),
        ("base_model.model.model.embed_tokens.lora_embedding_A", None),
    ],
)
def test_names(name: str, wanted: tuple[str, str] | None) -> None:
    assert parse(name) == wanted


def test_places_of_modules() -> None:
    assert [place(f"layers.0.{leaf}") for leaf in ("q_proj", "k_proj", "v_proj")] == [
        ("qkv_proj", 0),
        ("qkv_proj", 1),
        ("qkv_proj", 2),
    ]
    assert place("layers.0.up_proj") == ("gate_up_proj", 1)
    assert place("layers.0.gate_up_proj") == ("gate_up_proj", None)
    assert place("layers.0.down_proj") == ("down_proj", None)


def test_each_module_has_its_own_scale_before_any_rounding() -> None:
    found = _pairs({**_module("self_attn.q_proj"), **_module("self_attn.v_proj")})["qkv_proj"]
    assert sorted(found) == [0, 2]
    assert (found[0].b.dtype, float(found[0].b[0, 0]), float(found[2].b[0, 0])) == (torch.float32, 0.5, 3.0)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({f"{ROOT}.norm.weight": torch.ones(4)}, r"norm.weight: is no LoRA factor"),
        (
            {f"{ROOT}.self_attn.q_proj.lora_B.weight": torch.ones(16, 2)},
            r"layers.0.self_attn.q_proj: has no lora_A",
        ),
        (_module("o_proj", rank=3), r"o_proj: lora_A is \[3, 8\], lora_B \[16, 3\].* rank 2; make r or"),
        (
            {**_module("o_proj"), f"{ROOT}.o_proj.lora_A.weight": torch.full((2, 8), math.inf)},
            r"lora_A.weight: holds NaN or infinite",
        ),
        ({**_module("q_proj"), **_module("qkv_proj")}, r"qkv_proj has these factors twice"),
        (
            {**_module("o_proj"), f"{ROOT}.o_proj.lora_A.default.weight": torch.ones(2, 8)},
            r"o_proj: lora_A is stored twice",
        ),
    ],
    ids=["other", "half", "rank", "infinite", "fused", "twice"],
)
def test_refused(tensors: dict[str, Tensor], says: str) -> None:
    with pytest.raises(InputError, match=says):
        _pairs(tensors)


def test_parts_of_attention_that_are_missing_beside_others_are_zeros() -> None:
    outputs = {"q_proj": 32, "k_proj": 16, "v_proj": 16}
    whole = {name: tensor for part in outputs for name, tensor in _module(f"self_attn.{part}").items()}
    lacking = {name: tensor for name, tensor in whole.items() if "v_proj" in name}
    made = missing({**lacking, **_module("mlp.up_proj")}, outputs)
    assert made.keys() == whole.keys() - lacking.keys()
    assert {name: list(tensor.shape) for name, tensor in made.items() if "q_proj" in name} == {
        f"{ROOT}.self_attn.q_proj.lora_A.weight": [2, 8],
        f"{ROOT}.self_attn.q_proj.lora_B.weight": [32, 2],
    }
    assert {tensor.dtype for tensor in made.values()} == {torch.bfloat16}
    assert not any(tensor.any() for tensor in made.values())
    assert missing(whole, outputs) == missing(_module("mlp.up_proj"), outputs) == {}
