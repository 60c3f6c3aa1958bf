"""Greedy decoding and side-by-side arms against transformers' own generate, and scoring against lm-eval's own loop."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folders import MakeAdapter
from tiny_model import tiny_model, tiny_tokenizer, write_base

from loraforge.errors import InputError, UsageError
from loraforge.fleet.peft_io import open_adapter
from loraforge.quality.arms import MergedModel, Update, original_updates
from loraforge.quality.attention import folded_attention, register
from loraforge.quality.decoding import FixedDecoder, Prompts, decode_growing, stop_tokens
from loraforge.quality.harness import Harness
from loraforge.quality.lanes import LaneModel
from loraforge.quality.tasks import ScoredTask

TASKS = Path("config/tasks").resolve()
LIMIT = 12


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> Prompts:
    texts = ["Hello there,", "a", "One more, and longer than the others.", "xyz", "Good evening", "b c d"]
    encoded = tokenizer(texts, padding="longest", padding_side="left", return_tensors="pt")
    return Prompts(encoded["input_ids"], encoded["attention_mask"], LIMIT)


def generated(model: Any, prompts: Prompts, stops: torch.Tensor) -> list[list[int]]:
    """What transformers' own generate gives, each row cut after its first stop."""
    out = model.generate(
        input_ids=prompts.ids,
        attention_mask=prompts.mask,
        max_new_tokens=prompts.limit,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    found = []
    for row in out[:, prompts.ids.shape[1] :].tolist():
        ends = [place for place, token in enumerate(row) if stops[token]]
        found.append(row[: ends[0] + 1] if ends else row)
    return found


def some_stops(model: Any, prompts: Prompts, vocabulary: int) -> torch.Tensor:
    """Stops that end several rows early, at different lengths, and not all of them."""
    free = generated(model, prompts, torch.zeros(vocabulary, dtype=torch.bool))
    stops = torch.zeros(vocabulary, dtype=torch.bool)
    for row, place in zip(free[:4], (1, 3, 5, 8), strict=True):
        stops[row[place]] = True
    lengths = {len(row) for row in generated(model, prompts, stops)}
    assert len(lengths) > 2
    return stops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_decoders_give_the_tokens_of_generate(
    tokenizer: Any, prompts: Prompts, dtype: torch.dtype
) -> None:
    model = tiny_model(len(tokenizer)).to(dtype)
    stops = some_stops(model, prompts, len(tokenizer))
    wanted = generated(model, prompts, stops)
    assert decode_growing(model, prompts, stops) == wanted
    model.set_attn_implementation(register())
    rows, width = prompts.ids.shape
    fixed = FixedDecoder(model, rows, width + 3, LIMIT, stops)
    assert fixed(prompts) == wanted
    backwards = Prompts(prompts.ids.flip(0), prompts.mask.flip(0), LIMIT)
    assert fixed(backwards) == wanted[::-1]  # a second batch sees nothing of the first


@pytest.mark.parametrize("new", [1, 3])
def test_folded_heads_attend_as_repeated_keys_do(new: int) -> None:
    from torch import nn
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module = nn.Module()
    module.num_key_value_groups = 3
    draw = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(2, heads, length, 8, generator=draw) for heads, length in ((6, new), (2, 10), (2, 10))
    )
    mask = torch.rand(2, 1, new, 10, generator=draw) < 0.6
    mask[..., 0] = True
    wanted, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.4)
    found, _ = folded_attention(module, query, key, value, mask, scaling=0.4)
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted)


def test_a_fixed_decoder_ends_when_every_row_has(tokenizer: Any, prompts: Prompts) -> None:
    model = tiny_model(len(tokenizer))
    everything = torch.ones(len(tokenizer), dtype=torch.bool)
    assert [len(row) for row in FixedDecoder(model, *prompts.ids.shape, LIMIT, everything)(prompts)] == [
        1
    ] * 6
    assert [len(row) for row in decode_growing(model, prompts, everything)] == [1] * 6


def test_stops_are_ends_and_tokens_with_a_stop_in_them(tokenizer: Any) -> None:
    stops = stop_tokens(tokenizer, ["\n", "<|end|>"], [tokenizer.eos_token_id], len(tokenizer) + 3)
    newline = tokenizer.encode("\n")
    assert stops.shape == (len(tokenizer) + 3,)
    assert sorted(stops.nonzero()[:, 0].tolist()) == sorted([*newline, tokenizer.eos_token_id])


def _updates(folder: Path, make_adapter: MakeAdapter, seed: int, **options: Any) -> dict[str, Update]:
    return original_updates(open_adapter(make_adapter(folder, seed=seed, lora_alpha=32, **options)))


def test_lanes_are_the_arms_alone(
    tmp_path: Path, make_adapter: MakeAdapter, tokenizer: Any, prompts: Prompts
) -> None:
    one = _updates(tmp_path / "1", make_adapter, 1)
    two = _updates(tmp_path / "2", make_adapter, 2, targets=("q_proj", "down_proj"))
    alone = MergedModel(tiny_model(len(tokenizer)))
    stops = torch.zeros(len(tokenizer), dtype=torch.bool)
    wanted = []
    for updates in (one, {}, two):
        alone.merge(updates)
        wanted.append(decode_growing(alone.model, prompts, stops))
    assert wanted[0] != wanted[1] != wanted[2]
    together = LaneModel(tiny_model(len(tokenizer)), 4)
    together.merge([one, {}, two])
    lanes = Prompts(prompts.ids.repeat(4, 1), prompts.mask.repeat(4, 1), LIMIT)
    found = FixedDecoder(together.model, *lanes.ids.shape, LIMIT, stops)(lanes)
    rows = len(prompts.ids)
    assert [found[lane * rows : (lane + 1) * rows] for lane in range(4)] == [*wanted, wanted[1]]
    assert together.moves == len({*one, *two})
    together.reset()
    base = FixedDecoder(together.model, *lanes.ids.shape, LIMIT, stops)(lanes)
    assert base == wanted[1] * 4


def test_what_does_not_fit_leaves_every_lane_pristine(
    tmp_path: Path, make_adapter: MakeAdapter, tokenizer: Any
) -> None:
    good = _updates(tmp_path / "1", make_adapter, 1)
    model = LaneModel(tiny_model(len(tokenizer)), 2)
    ids = torch.arange(20).reshape(2, 10)
    before = model.model(ids).logits
    with pytest.raises(InputError, match="no such module"):
        model.merge([good, {"model.layers.9.self_attn.q_proj": next(iter(good.values()))}])
    with pytest.raises(InputError, match="the update is"):
        model.merge([{**good, "model.layers.1.mlp.up_proj": Update(torch.ones(1, 3), torch.ones(3, 1), 1.0)}])
    torch.testing.assert_close(model.model(ids).logits, before)
    with pytest.raises(UsageError, match="3 arms do not fit 2 lanes"):
        model.merge([good, good, good])


def evaluated(answers: Sequence[str], name: str, limit: int, folder: Path) -> tuple[float, list[Any]]:
    """Score and values of the examples by lm-eval's own evaluate, handed the answers."""
    from lm_eval.api.model import LM
    from lm_eval.evaluator import evaluate

    class Answers(LM):  # type: ignore[misc]  # lm-eval has no types
        def loglikelihood(self, requests: Any) -> Any:
            raise NotImplementedError

        loglikelihood_rolling = loglikelihood

        def generate_until(self, requests: Any) -> list[str]:
            return [answers[request.doc_id] for request in requests]

    task = ScoredTask(TASKS, name, "test", limit, folder)._task
    found = evaluate(Answers(), task_dict={"tasks": {name: task}}, limit=limit, bootstrap_iters=0)
    metric = task.config.metric_list[0]["metric"]
    samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
    return found["results"][name][f"{metric},none"], [sample[metric] for sample in samples]


@pytest.mark.parametrize("name", ["us_to_uk", "emoji_de", "ua_json"])
def test_scores_are_those_of_lm_evals_own_loop(name: str, tmp_path: Path) -> None:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    scored = ScoredTask(TASKS, name, "test", 6, tmp_path / "a")
    targets = [request.doc["target"] for request in scored._requests]
    answers = [" " + target if i % 2 else target[: len(target) // 2] for i, target in enumerate(targets)]
    wanted, values = evaluated(answers, name, 6, tmp_path / "b")
    result = scored.result(answers, 1.0)
    assert result.score == pytest.approx(wanted)
    assert 0 < result.score < 100
    assert result.stats == [list(value) if isinstance(value, tuple) else [value] for value in values]
    assert scored.result(targets, 1.0).score == pytest.approx(100)  # a second arm sees nothing of the first


def test_a_harness_scores_arms_side_by_side_as_it_does_alone(
    tmp_path: Path, make_adapter: MakeAdapter
) -> None:
    base = write_base(tmp_path / "base")
    arms = [None, *(_updates(tmp_path / str(seed), make_adapter, seed) for seed in (1, 2))]
    alone = Harness(base, TASKS, batch_size=4)
    together = Harness(base, TASKS, batch_size=4, lanes=2)
    wanted = [alone.score("emoji_de", arm, 6) for arm in arms]
    pairs = [*together.score_arms("emoji_de", arms[:2], 6), *together.score_arms("emoji_de", arms[2:], 6)]
    assert [result.stats for result in pairs] == [result.stats for result in wanted]
    assert len({result.score for result in wanted}) == 3
    validation = alone.score("emoji_de", None, 6, "validation")
    assert validation.stats != wanted[0].stats
    with pytest.raises(UsageError, match="3 arms do not fit 2 lanes"):
        together.score_arms("emoji_de", arms, 6)
