"""Recipes, the loss mask, batches, and a whole training run on a small model."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_model import tiny_model, tiny_tokenizer, write_base

from loraforge.errors import InputError, LoraForgeError, UsageError
from loraforge.files import write_jsonl
from loraforge.fleet.peft_io import open_adapter
from loraforge.fleet.recipe import load_recipe
from loraforge.fleet.train import adapter_name, batches, collate, encode, learning_rate, train_fleet
from loraforge.fleet.validation import generate

RECIPES = sorted(Path("config/fleets/smol").glob("*/recipe.yaml"))
SMALL = """\
task: us_to_uk
rank: 4
alpha: 8
target_modules: [q_proj, down_proj]
layers: [1]
rank_pattern: {down_proj: 2}
alpha_pattern: {down_proj: 6}
lr: 5.0e-2
batch_size: 4
steps: 60
evaluations: 2
"""


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.parent.name)
def test_shipped_recipes_are_valid_and_named_after_their_task(path: Path) -> None:
    assert load_recipe(path).task == path.parent.name == adapter_name(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("steps: 60\n", ""), "give steps or epochs"),
        (("steps: 60", "steps: 60\nepochs: 2"), "give steps or epochs"),
        (("rank: 4", "rank: 0"), "rank: Input should be greater than or equal to 1"),
        (("q_proj, down_proj", "q_proj, q_proj"), "target_modules names something twice"),
        (("q_proj, down_proj", "query"), "target_modules.0: Input should be"),
        (("lr:", "learning_rate:"), "lr: Field required"),
        (("{down_proj: 2}", "{'(': 2}"), "is not a regular expression"),
        (("task: us_to_uk", "- us_to_uk"), "not valid YAML"),
    ],
)
def test_bad_recipes_are_refused_with_file_and_key(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(SMALL.replace(*change))
    with pytest.raises(LoraForgeError) as caught:
        load_recipe(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_the_loss_counts_the_completion_and_its_end_only() -> None:
    """The positions and targets give the loss that transformers computes from masked labels."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(len(tokenizer))
    examples = [
        encode(tokenizer, prompt, target, 64) for prompt, target in (("Q: a\nA:", "bc"), ("Longer: x", "y"))
    ]
    ids, positions, targets = collate(examples, tokenizer.pad_token_id)
    end = tokenizer.decode([tokenizer.eos_token_id])
    assert tokenizer.decode(targets) == f" bc{end} y{end}"

    labels = torch.full_like(ids, -100)
    for row, example in enumerate(examples):
        labels[row, example.n_prompt : len(example.ids)] = torch.tensor(example.ids[example.n_prompt :])
    expected = model(input_ids=ids, labels=labels).loss
    hidden = model.model(input_ids=ids).last_hidden_state.flatten(0, 1)[positions]
    actual = torch.nn.functional.cross_entropy(model.lm_head(hidden), targets)
    torch.testing.assert_close(actual, expected)


def test_a_long_prompt_loses_its_start_and_a_long_target_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    example = encode(tokenizer, "0123456789", "ab", 8)
    assert tokenizer.decode(example.ids[: example.n_prompt]) == "6789"
    assert len(example.ids) == 8
    with pytest.raises(InputError, match="exceeds max_length 8"):
        encode(tokenizer, "p", "a long target", 8)


def test_batches_visit_every_example_once_an_epoch_in_similar_lengths() -> None:
    lengths = [5 + (i * 37) % 50 for i in range(100)]
    epoch = list(batches(lengths, 8, 13, seed=3))  # 100 examples are 13 batches
    assert Counter(i for batch in epoch for i in batch) == Counter(range(100))
    assert max(max(lengths[i] for i in batch) - min(lengths[i] for i in batch) for batch in epoch) < 10
    assert epoch == list(batches(lengths, 8, 13, seed=3))
    assert epoch != list(batches(lengths, 8, 13, seed=4))
    assert len(list(batches(lengths, 8, 30, seed=3))) == 30


def test_learning_rate_rises_then_falls_to_nearly_zero() -> None:
    rates = [learning_rate(step, 100, 1.0, 0.1) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 1e-3


def test_generation_does_not_depend_on_the_batch() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(len(tokenizer))
    prompts = ["a", "some longer prompt", "mid one", "b"]
    together = generate(model, tokenizer, prompts, max_new_tokens=6)
    alone = [generate(model, tokenizer, [prompt], max_new_tokens=6)[0] for prompt in prompts]
    assert together == alone


def test_training_learns_saves_plain_peft_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_base(tmp_path / "base")
    examples = [{"id": str(i), "prompt": f"{i}:", "target": "ab", "item": str(i)} for i in range(16)]
    for split in ("train", "validation"):
        write_jsonl(tmp_path / "tasks" / "us_to_uk" / f"{split}.jsonl", examples)
    recipe = tmp_path / "recipes" / "small.yaml"
    recipe.parent.mkdir()
    recipe.write_text(SMALL)
    missing = tmp_path / "recipes" / "missing.yaml"
    missing.write_text(SMALL.replace("us_to_uk", "lemma_es"))
    options = {"base": base, "tasks": tmp_path / "tasks", "out": tmp_path / "out"}

    failures = train_fleet([recipe, missing], **options)
    assert list(failures) == ["missing"]
    assert "train.jsonl: file not found" in failures["missing"]
    assert not (tmp_path / "out" / "missing").exists()

    record = json.loads((tmp_path / "out" / "small" / "training.json").read_text())
    assert record["train_loss"]["last"] < 0.7 * record["train_loss"]["first"]
    assert [point["step"] for point in record["validation"]["history"]] == [30, 60]
    adapter = open_adapter(tmp_path / "out" / "small")
    assert {(m.name, m.rank, m.scale) for m in adapter.modules} == {
        ("model.layers.1.self_attn.q_proj", 4, 2.0),
        ("model.layers.1.mlp.down_proj", 2, 3.0),
    }
    assert str(tmp_path) not in (tmp_path / "out" / "small" / "adapter_config.json").read_text()

    first = load_file(tmp_path / "out" / "small" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in first.values()} == {torch.bfloat16}
    train_fleet([recipe], **options)
    assert "1 of 1 adapters are trained already" in capsys.readouterr().err
    train_fleet([recipe], **(options | {"out": tmp_path / "again"}))
    second = load_file(tmp_path / "again" / "small" / "adapter_model.safetensors")
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_recipes_of_one_name_are_refused(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.yaml").write_text(SMALL)
    with pytest.raises(UsageError, match="two recipes have one name"):
        train_fleet(
            [tmp_path / "a/same.yaml", tmp_path / "b/same.yaml"], base=tmp_path, tasks=tmp_path, out=tmp_path
        )
