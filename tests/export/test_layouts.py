"""Layout configurations against PEFT's own matching rules."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraforge.export.layouts import (
    adapter_config,
    layout_rank,
    pad_factors,
    pattern_keys,
    pattern_matches,
    target_fields,
)

peft_other = pytest.importorskip("peft.utils.other")
tuners = pytest.importorskip("peft.tuners.tuners_utils")

NAMES = [
    f"model.layers.{layer}.{tail}"
    for layer in range(12)
    for tail in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
]
PLAIN = {"target_modules": ["q_proj", "v_proj", "down_proj"], "r": 16, "lora_alpha": 32, "use_rslora": True}


def test_ragged_rank_is_the_most_common_and_ties_go_up() -> None:
    assert layout_rank("ragged", {"a": 2, "b": 2, "c": 5}) == 2
    assert layout_rank("ragged", {"a": 2, "b": 5}) == 5
    assert layout_rank("padded", {"a": 2, "b": 2, "c": 5}) == 5


@given(ranks=st.lists(st.integers(1, 64), min_size=len(NAMES), max_size=len(NAMES)))
def test_peft_reads_every_rank_back_and_scale_is_one(ranks: list[int]) -> None:
    wanted = dict(zip(NAMES, ranks, strict=True))
    config = adapter_config(PLAIN, "ragged", wanted)
    for name, rank in wanted.items():
        key = peft_other.get_pattern_key(config["rank_pattern"].keys(), name)
        r = config["rank_pattern"].get(key, config["r"])
        alpha = config["alpha_pattern"].get(key, config["lora_alpha"])
        assert (r, alpha / r) == (rank, 1.0)
    assert config["lora_alpha"] / config["r"] == 1.0  # a loader that ignores the patterns
    assert config["use_rslora"] is False


def test_pattern_keys_stay_apart_where_one_name_ends_another() -> None:
    names = ["proj", "block.proj", "layers.1.up", "model.layers.1.up", "model.layers.11.up", "layers_1.up"]
    keys = pattern_keys(tuple(names))
    for order in (names, names[::-1]):
        ordered = [keys[name] for name in order]
        for name in names:
            assert peft_other.get_pattern_key(ordered, name) == keys[name]
    assert keys["model.layers.11.up"] == "model.layers.11.up"  # plain wherever plain is safe
    assert keys["proj"] == "^proj"
    assert keys["block.proj"] == "block.proj"


@given(names=st.lists(st.text("ab.-", min_size=1, max_size=6), max_size=8, unique=True))
def test_a_key_is_plain_exactly_where_it_matches_no_other_name(names: list[str]) -> None:
    for name, key in pattern_keys(tuple(names)).items():
        alone = [other for other in names if pattern_matches(name, other)] == [name]
        assert key == (name if alone else "^" + re.escape(name))


def test_a_name_that_is_no_plain_expression_is_escaped() -> None:
    assert pattern_keys(("a+b", "c[0]", "d(", "e")) == {
        "a+b": r"^a\+b", "c[0]": r"^c\[0\]", "d(": r"^d\(", "e": "e",
    }  # fmt: skip


def test_layers_one_and_eleven_do_not_match_each_other() -> None:
    one, eleven = "model.layers.1.mlp.up_proj", "model.layers.11.mlp.up_proj"
    assert not pattern_matches(one, eleven)
    assert not pattern_matches(eleven, one)


def test_short_targets_are_kept_only_where_they_mean_the_same_modules() -> None:
    assert target_fields(PLAIN, NAMES) == {"target_modules": ["down_proj", "q_proj", "v_proj"]}
    cleared = {"layers_to_transform": None, "layers_pattern": None, "exclude_modules": None}
    assert target_fields(PLAIN, NAMES[:-1]) == {"target_modules": NAMES[:-1], **cleared}
    for other in (
        {"target_modules": r".*\.(q|v|down)_proj"},
        {"target_modules": [*PLAIN["target_modules"], "k_proj"]},
        {**PLAIN, "exclude_modules": ["model.layers.12.mlp.down_proj"]},
        {"target_modules": None},
    ):
        assert target_fields(other, NAMES) == {"target_modules": NAMES, **cleared}
    assert target_fields({"target_modules": ["a", "b"]}, ["a", "b"])["target_modules"] == ["a", "b"]


@pytest.mark.parametrize("kept", [NAMES, NAMES[:-1], NAMES[:3], NAMES[3:6] + NAMES[33:]])
def test_peft_targets_exactly_these_modules(kept: list[str]) -> None:
    original = {**PLAIN, "layers_to_transform": sorted({int(name.split(".")[2]) for name in kept})}
    config = adapter_config(original, "padded", dict.fromkeys(kept, 3))
    fields = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
    shim = SimpleNamespace(**{field: config.get(field) for field in fields})
    found = [name for name in NAMES if tuners.check_target_module_exists(shim, name)]
    assert found == kept


def test_training_only_options_are_dropped_and_the_rest_is_kept() -> None:
    original = {
        **PLAIN,
        "base_model_name_or_path": "some/base",
        "bias": "all",
        "fan_in_fan_out": False,
        "init_lora_weights": "eva",
        "eva_config": {"rho": 2.0},
        "inference_mode": False,
    }
    config = adapter_config(original, "padded", dict.fromkeys(NAMES, 3))
    assert "eva_config" not in config
    assert config["init_lora_weights"] is True
    assert config["inference_mode"] is True
    assert (config["base_model_name_or_path"], config["bias"]) == ("some/base", "all")
    assert (config["rank_pattern"], config["alpha_pattern"]) == ({}, {})


@given(k=st.integers(1, 6), extra=st.integers(0, 5), seed=st.integers(0, 1000))
def test_padding_leaves_the_product_alone(k: int, extra: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(k, 7, generator=generator), torch.randn(9, k, generator=generator)
    padded_a, padded_b = pad_factors(a, b, k + extra)
    assert padded_a.shape == (k + extra, 7)
    assert padded_b.shape == (9, k + extra)
    assert torch.equal(padded_a[:k], a)
    assert not padded_a[k:].any()
    assert not padded_b[:, k:].any()
    assert torch.allclose(padded_b @ padded_a, b @ a, atol=1e-6)
