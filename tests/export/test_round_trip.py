"""Exported folders in real PEFT, and in two hand-written loaders, give the truncated reference's logits.

Tolerances, relative to the largest effect of the truncated adapter on a logit: 1e-4 for float32 factors, and
2e-2 for bfloat16, whose unit roundoff is 4e-3.
"""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from loraforge.errors import InputError
from loraforge.export.directions import CachedFleet
from loraforge.export.manifest import AdapterEntry
from loraforge.export.writer import write_adapter
from loraforge.factor.fleet import factorise_fleet
from loraforge.factor.reference import dense_svd
from loraforge.fleet.peft_io import Adapter, open_adapter

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

MakeAdapter = Callable[..., Path]
LAYERS = 12  # so that "layers.1" and "layers.11" both exist
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
# alphas small enough that an update is no larger than the weight it changes
SOURCES: dict[str, dict[str, Any]] = {
    "plain": {"r": 6, "lora_alpha": 0.75, "targets": ("q_proj", "v_proj")},
    "rslora": {"r": 9, "lora_alpha": 0.25, "targets": ALL, "use_rslora": True},
    "patterns": {
        "r": 4,
        "lora_alpha": 0.5,
        "targets": ("q_proj", "k_proj", "v_proj", "o_proj"),
        "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 7, "v_proj": 3},
        "alpha_pattern": {"o_proj": 0.25, "layers.11.self_attn.q_proj": 2},
    },
    "layers": {
        "r": 5,
        "targets": ("gate_proj", "down_proj"),
        "layers": (1, 11),
        "layers_to_transform": [1, 11],
    },
    "regex": {
        "r": 5,
        "targets": ("q_proj",),
        "layers": (0, 3),
        "target_modules": r".*layers\.[03]\.self_attn\.q_proj",
    },
    "half": {"r": 4, "targets": ("up_proj", "o_proj"), "dtype": torch.bfloat16},
    "zero": {"r": 4, "targets": ("up_proj",), "zero_b": True},
}


@pytest.fixture(scope="module")
def tiny_llama() -> torch.nn.Module:
    """A random Llama with the module shapes of ``make_adapter``."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(0, 64, (3, 11), generator=torch.Generator().manual_seed(1))


def truncated_model(base: torch.nn.Module, original: Path, ranks: Mapping[str, int]) -> torch.nn.Module:
    """``base`` with W + s trunc_k(B A) in every adapted module; dense FP64 SVD, nothing shared with the export."""
    adapter = open_adapter(original)
    model = copy.deepcopy(base)
    for module in adapter.modules:
        u, s, vh = dense_svd(*adapter.factors(module), module.scale)
        k = ranks[module.name]
        weight = model.get_submodule(module.name).weight
        update = (u[:, :k] * s[:k]) @ vh[:k]
        weight.data = (weight.data.double() + update).to(weight.dtype)
    return model


def write(adapter: Adapter, tmp_path: Path, ranks: dict[str, int], dtype: torch.dtype) -> AdapterEntry:
    source = CachedFleet([adapter], factorise_fleet([adapter], tmp_path / "cache"))
    [directions] = source.directions({adapter.name: ranks}, dtype)
    return write_adapter(tmp_path / "out", directions, ranks)


def build(
    make_adapter: MakeAdapter,
    tmp_path: Path,
    source: str,
    dtype: torch.dtype,
    seed: int,
    top: int | None = None,
) -> tuple[Path, dict[str, int], AdapterEntry]:
    fields = {"layers": range(LAYERS), "lora_alpha": 0.5, **SOURCES[source]}
    original = make_adapter(tmp_path / "original" / source, seed=seed, **fields)
    adapter = open_adapter(original)
    rng = np.random.default_rng(seed)
    ranks = {
        module.name: int(rng.integers(1, min(module.rank, top or module.rank) + 1))
        for module in adapter.modules
    }
    entry = write(adapter, tmp_path, ranks, dtype)
    return original, ranks, entry


def logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens).logits.double()


def check(got: torch.Tensor, wanted: torch.Tensor, base: torch.Tensor, dtype: torch.dtype) -> None:
    effect = (wanted - base).abs().max()
    assert (got - wanted).abs().max() <= TOLERANCE[dtype] * effect + 1e-6


def hand_loader(base: torch.nn.Module, folder: Path, *, honour_patterns: bool) -> torch.nn.Module:
    """What an engine does: read r, lora_alpha and, if it knows them, the patterns; add scale B A."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    model = copy.deepcopy(base)
    for key, a in tensors.items():
        found = re.fullmatch(r"base_model\.model\.(.+)\.lora_A\.weight", key)
        if found is None:
            continue
        name = found[1]
        b = tensors[key.replace("lora_A", "lora_B")]
        r, alpha = config["r"], config["lora_alpha"]
        if honour_patterns:
            r = config["rank_pattern"].get(name, r)
            alpha = config["alpha_pattern"].get(name, alpha)
            assert a.shape[0] == r
        scale = alpha / (r**0.5 if config["use_rslora"] else r)
        assert scale == 1.0
        weight = model.get_submodule(name).weight
        weight.data = weight.data + scale * (b.float() @ a.float())
    return model


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("source", list(SOURCES))
def test_every_loader_gives_the_truncated_reference(
    source: str,
    dtype: torch.dtype,
    tmp_path: Path,
    make_adapter: MakeAdapter,
    tiny_llama: torch.nn.Module,
    tokens: torch.Tensor,
) -> None:
    original, ranks, entry = build(make_adapter, tmp_path, source, dtype, seed=3)
    base = logits(tiny_llama, tokens)
    wanted = logits(truncated_model(tiny_llama, original, ranks), tokens)
    for layout in ("ragged", "padded"):
        folder = tmp_path / "out" / layout / source
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # PEFT warns of missing and unexpected keys
            model = peft.PeftModel.from_pretrained(copy.deepcopy(tiny_llama), folder).eval()
        layers = {
            name.removeprefix("base_model.model."): layer
            for name, layer in model.named_modules()
            if isinstance(layer, peft.tuners.lora.LoraLayer)
        }
        assert set(layers) == set(ranks)
        assert {layer.scaling["default"] for layer in layers.values()} == {1.0}
        live = ranks if layout == "ragged" else dict.fromkeys(ranks, max(ranks.values()))
        assert {name: layer.r["default"] for name, layer in layers.items()} == live
        check(logits(model, tokens), wanted, base, dtype)
        for honour_patterns in (True, False):
            other = hand_loader(tiny_llama, folder, honour_patterns=honour_patterns)
            check(logits(other, tokens), wanted, base, dtype)
    for module in entry.modules.values():
        assert module.certificate.action_error < TOLERANCE[dtype]


@pytest.mark.parametrize("source", ["rslora", "patterns"])
def test_rank_one(
    source: str, tmp_path: Path, make_adapter: MakeAdapter, tiny_llama: torch.nn.Module, tokens: torch.Tensor
) -> None:
    original, ranks, _ = build(make_adapter, tmp_path, source, torch.float32, seed=5, top=1)
    assert set(ranks.values()) == {1}
    wanted = logits(truncated_model(tiny_llama, original, ranks), tokens)
    for layout in ("ragged", "padded"):
        model = peft.PeftModel.from_pretrained(
            copy.deepcopy(tiny_llama), tmp_path / "out" / layout / source
        ).eval()
        check(logits(model, tokens), wanted, logits(tiny_llama, tokens), torch.float32)


@pytest.mark.parametrize("source", ["plain", "patterns", "layers", "regex"])
def test_modules_without_a_direction_are_left_out(
    source: str, tmp_path: Path, make_adapter: MakeAdapter, tiny_llama: torch.nn.Module, tokens: torch.Tensor
) -> None:
    fields = {"layers": range(LAYERS), "lora_alpha": 0.5, **SOURCES[source]}
    original = make_adapter(tmp_path / "original" / source, seed=3, **fields)
    adapter = open_adapter(original)
    # some here and there, and a whole layer, which the original's list of layers still names
    ranks = {
        module.name: 0 if index % 3 == 1 or module.name.startswith("model.layers.0.") else 2
        for index, module in enumerate(adapter.modules)
    }
    ranks[adapter.modules[-1].name] = 3
    entry = write(adapter, tmp_path, ranks, torch.float32)
    kept = {name: k for name, k in ranks.items() if k}
    assert (set(entry.modules), set(entry.dropped)) == (set(kept), set(ranks) - set(kept))
    wanted = logits(truncated_model(tiny_llama, original, ranks), tokens)
    for layout in ("ragged", "padded"):
        folder = tmp_path / "out" / layout / source
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = peft.PeftModel.from_pretrained(copy.deepcopy(tiny_llama), folder).eval()
        layers = {
            name.removeprefix("base_model.model.")
            for name, layer in model.named_modules()
            if isinstance(layer, peft.tuners.lora.LoraLayer)
        }
        assert layers == set(kept)
        check(logits(model, tokens), wanted, logits(tiny_llama, tokens), torch.float32)
        assert {module.name for module in open_adapter(folder).modules} == set(kept)


def test_what_cannot_be_left_out(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    adapter = open_adapter(make_adapter(tmp_path / "one"))
    with pytest.raises(InputError, match="keeps no direction at all"):
        write(adapter, tmp_path, dict.fromkeys((module.name for module in adapter.modules), 0), torch.float32)
    name = adapter.modules[0].name
    biased = make_adapter(
        tmp_path / "two", extra={f"base_model.model.{name}.lora_B.bias": torch.ones(32)}, lora_bias=True
    )
    adapter = open_adapter(biased)
    ranks = {module.name: int(module.name != name) for module in adapter.modules}
    with pytest.raises(InputError, match=f"{name}: shares its tensors .* rank floor is 1"):
        write(adapter, tmp_path, ranks, torch.float32)


def test_passthrough_tensors_are_copied_byte_for_byte(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    head = torch.randn(64, 32, generator=torch.Generator().manual_seed(9)).to(torch.float16)
    bias = torch.randn(32, dtype=torch.float64)
    extra = {
        "base_model.model.lm_head.weight": head,
        "base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias": bias,
    }
    folder = make_adapter(tmp_path / "one", extra=extra, modules_to_save=["lm_head"], bias="lora_only")
    adapter = open_adapter(folder)
    entry = write(adapter, tmp_path, {module.name: 1 for module in adapter.modules}, torch.bfloat16)
    assert set(entry.passthrough) == set(extra)
    for layout in ("ragged", "padded"):
        tensors = load_file(tmp_path / "out" / layout / "one" / "adapter_model.safetensors")
        config = json.loads((tmp_path / "out" / layout / "one" / "adapter_config.json").read_text())
        assert (config["modules_to_save"], config["bias"]) == (["lm_head"], "lora_only")
        for key, tensor in extra.items():
            assert tensors[key].dtype == tensor.dtype
            assert torch.equal(tensors[key].view(torch.uint8), tensor.view(torch.uint8))


def test_manifest_entry_is_what_is_on_disk(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    original, ranks, entry = build(make_adapter, tmp_path, "patterns", torch.bfloat16, seed=7)
    adapter = open_adapter(original)
    for layout, weights in entry.layouts.items():
        path = tmp_path / "out" / layout / "patterns" / "adapter_model.safetensors"
        assert path.stat().st_size == weights.bytes
        tensors = load_file(path)
        for module in adapter.modules:
            pair = tensors[module.a_key], tensors[module.b_key]
            stated = entry.modules[module.name]
            assert sum(t.numel() * t.element_size() for t in pair) == stated.physical_bytes[layout]
            k = ranks[module.name]
            assert stated.k == k
            assert stated.compact_parameters == k * (module.d_in + module.d_out)
            assert not pair[0][k:].any()
            assert not pair[1][:, k:].any()
            dense = module.scale * np.linalg.svd(
                (adapter.factors(module)[1].double() @ adapter.factors(module)[0].double()).numpy(),
                compute_uv=False,
            )
            energy = (dense[:k] ** 2).sum() / (dense**2).sum()
            assert stated.certificate.retained_energy == pytest.approx(energy, rel=1e-6)
            assert stated.certificate.relative_error == pytest.approx(max(0.0, 1 - energy) ** 0.5, abs=1e-6)
