"""Scoring on a GPU: one captured step, replayed, against transformers' own generate; lanes against arms alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folders import MakeAdapter
from tiny_model import tiny_model, tiny_tokenizer

from loraforge.fleet.peft_io import open_adapter
from loraforge.quality.arms import MergedModel, original_updates
from loraforge.quality.attention import register
from loraforge.quality.decoding import FixedDecoder, Prompts
from loraforge.quality.lanes import LaneModel

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LIMIT = 24


def prompts_of(tokenizer: Any) -> Prompts:
    texts = ["Hello there,", "a", "One more, and longer than the others.", "xyz"]
    encoded = tokenizer(texts, padding="longest", padding_side="left", return_tensors="pt").to("cuda")
    return Prompts(encoded["input_ids"], encoded["attention_mask"], LIMIT)


def generated(model: Any, prompts: Prompts) -> list[list[int]]:
    out = model.generate(
        input_ids=prompts.ids,
        attention_mask=prompts.mask,
        max_new_tokens=LIMIT,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    found: list[list[int]] = out[:, prompts.ids.shape[1] :].tolist()
    return found


def test_a_captured_step_gives_the_tokens_of_generate_and_follows_new_weights(
    tmp_path: Path, make_adapter: MakeAdapter
) -> None:
    tokenizer = tiny_tokenizer()
    prompts = prompts_of(tokenizer)
    model = tiny_model(len(tokenizer)).cuda()  # FP32: ties are no matter of rounding
    alone = MergedModel(model)
    updates = original_updates(open_adapter(make_adapter(tmp_path / "a", lora_alpha=32)))
    wanted = [generated(model, prompts)]
    alone.merge(updates)
    wanted.append(generated(model, prompts))
    alone.reset()
    model.set_attn_implementation(register())
    never = torch.zeros(len(tokenizer), dtype=torch.bool, device="cuda")
    rows, width = prompts.ids.shape
    decoder = FixedDecoder(model, rows, width, LIMIT, never)
    found = [decoder(prompts)]
    assert decoder._graph is not None
    alone.merge(updates)
    found.append(decoder(prompts))
    assert found == wanted
    assert wanted[0] != wanted[1]


def test_lanes_are_the_arms_alone(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    tokenizer = tiny_tokenizer()
    prompts = prompts_of(tokenizer)
    one = original_updates(open_adapter(make_adapter(tmp_path / "1", seed=1, lora_alpha=32)))
    two = original_updates(open_adapter(make_adapter(tmp_path / "2", seed=2, lora_alpha=32)))
    alone = MergedModel(tiny_model(len(tokenizer)).cuda())
    wanted: list[list[int]] = []
    for updates in (one, {}, two):
        alone.merge(updates)
        wanted += generated(alone.model, prompts)
    lanes = LaneModel(tiny_model(len(tokenizer)).cuda(), 3)
    lanes.model.set_attn_implementation(register())
    lanes.merge([one, {}, two])
    tiled = Prompts(prompts.ids.repeat(3, 1), prompts.mask.repeat(3, 1), LIMIT)
    never = torch.zeros(len(tokenizer), dtype=torch.bool, device="cuda")
    rows, width = tiled.ids.shape
    assert FixedDecoder(lanes.model, rows, width, LIMIT, never)(tiled) == wanted
