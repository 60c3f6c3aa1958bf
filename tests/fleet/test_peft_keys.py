"""Names of tensors by other trainers become PEFT's."""

from __future__ import annotations

import pytest

from loraforge.fleet.peft_keys import PREFIX, parse_key


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("base_model.model.model.layers.0.q_proj.lora_A.weight", "model.layers.0.q_proj.lora_A.weight"),
        ("model.layers.0.q_proj.lora_B.default.weight", "model.layers.0.q_proj.lora_B.weight"),
        ("base_model.model.h.embed.lora_embedding_A.default", "h.embed.lora_embedding_A"),
        ("base_model.model.h.q.lora_B.default.bias", "h.q.lora_B.bias"),
        ("base_model.model.lm_head.modules_to_save.default.weight", "lm_head.weight"),
        ("base_model.model.lm_head.modules_to_save.weight", "lm_head.weight"),
        ("base_model.model.q.hada_w1_a.default", "q.hada_w1_a"),
        ("base_model.model.q.lokr_w2.default", "q.lokr_w2"),
        ("base_model.model.q.vera_lambda_d.default", "q.vera_lambda_d"),
        ("base_model.model.q.lora_E.default", "q.lora_E"),
        # a module of that name is left alone
        ("base_model.model.heads.default.q_proj.lora_A.weight", "heads.default.q_proj.lora_A.weight"),
        ("base_model.model.default.lora_A.default.weight", "default.lora_A.weight"),
    ],
)
def test_canonical_names(stored: str, name: str) -> None:
    key = parse_key(stored)
    assert (key.stored, key.name, key.canonical) == (stored, name, PREFIX + name)
    assert parse_key(key.canonical).name == name
