"""Adapters answer unlabelled prompts: what their Fisher information is taken of, and what refined ones are taught."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loraforge.activation.inputs import read_texts
from loraforge.errors import InputError
from loraforge.fleet.offline import offline_imports
from loraforge.quality.arms import MergedModel
from loraforge.quality.decoding import Prompts, decode_growing

_ROWS = {"cpu": 64, "cuda": 256}  # prompts that are answered at once: on a GPU a row costs hardly any time
_PLACES = ("{}.jsonl", "{}.txt", "{}/{split}.jsonl")  # of an adapter's prompts in their folder


@dataclass(frozen=True)
class AnswerSettings:
    """How prompts are answered.

    Parameters
    ----------
    max_tokens: the last so many tokens of a prompt count. max_new_tokens: an answer ends there at the latest.
    batch_size: answers that are differentiated at once.
    """

    max_tokens: int = 512
    max_new_tokens: int = 96
    batch_size: int = 16


@dataclass(frozen=True)
class Answered:
    """Token ids of a prompt, and of the answer that an adapter gave to it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def find_prompts(folder: Path, adapter: str, *, limit: int | None = None, split: str = "train") -> list[str]:
    """Prompts of ``adapter``, the first ``limit``: in NAME.jsonl, NAME.txt or NAME/SPLIT.jsonl of ``folder``.

    Raises InputError where none of these exists, or it holds no text.
    """
    places = [folder / place.format(adapter, split=split) for place in _PLACES]
    for path in places:
        if path.is_file():
            return read_texts([path], limit=limit)
    raise InputError(
        f"no prompts of {adapter}",
        path=folder,
        remedy=f"write them to one of {', '.join(path.relative_to(folder).as_posix() for path in places)}",
    )


class OpenModel:
    """A base model and its tokenizer, loaded once; adapters are merged into it in turn."""

    def __init__(self, base: Path, device: str) -> None:
        with offline_imports():
            from transformers import AutoModelForCausalLM, AutoTokenizer
        self.tokenizer: Any = AutoTokenizer.from_pretrained(base)
        # BF16, as adapters are scored and served
        self.causal: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).to(device).eval()
        self.causal.requires_grad_(False)
        self.merged = MergedModel(self.causal)

    @classmethod
    @lru_cache(maxsize=1)
    def of(cls, base: Path, device: str) -> OpenModel:
        """The one of this process, which a worker opens once for all its adapters."""
        return cls(base, device)

    @property
    def pad(self) -> int:
        pad = self.tokenizer.pad_token_id
        return int(self.tokenizer.eos_token_id if pad is None else pad)


def answer(
    model: Any, tokenizer: Any, texts: Sequence[str], pad: int, settings: AnswerSettings
) -> list[Answered]:
    """Greedy answers of ``model`` to ``texts``, the end token included, shortest prompt first.

    Texts without a token are left out; raises InputError where that leaves none.
    """
    encoded = sorted(
        (tokenizer(text, add_special_tokens=False)["input_ids"][-settings.max_tokens :] for text in texts),
        key=len,
    )
    encoded = [ids for ids in encoded if ids]
    if not encoded:
        raise InputError(
            "the tokenizer finds no token in any prompt of an adapter",
            key="--prompts",
            remedy="give it others",
        )
    end = tokenizer.eos_token_id
    # a tokenizer may have no end, or one that the model has no logit of
    stops = torch.arange(model.config.vocab_size) == (-1 if end is None else end)
    found: list[Answered] = []
    at_once = _ROWS.get(model.device.type, _ROWS["cpu"])
    for start in range(0, len(encoded), at_once):
        rows = encoded[start : start + at_once]
        width = max(map(len, rows))
        ids = torch.full((len(rows), width), pad)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        for row, tokens in enumerate(rows):
            ids[row, width - len(tokens) :] = torch.tensor(tokens)
            mask[row, width - len(tokens) :] = 1
        answers = decode_growing(model, Prompts(ids, mask, settings.max_new_tokens), stops)
        found += [Answered(tuple(tokens), tuple(new)) for tokens, new in zip(rows, answers, strict=True)]
    return found


def collate(rows: Sequence[Answered], pad: int) -> tuple[Tensor, Tensor]:
    """Right-padded ids [rows, width], and the flat positions whose logits choose the answers' tokens.

    No mask is needed: attention is causal, and no position that counts sees the padding behind it.
    """
    width = max(len(row.prompt) + len(row.answer) for row in rows)
    ids = torch.full((len(rows), width), pad)
    positions: list[int] = []
    for number, row in enumerate(rows):
        ids[number, : len(row.prompt) + len(row.answer)] = torch.tensor(row.prompt + row.answer)
        first = number * width + len(row.prompt) - 1
        positions += range(first, first + len(row.answer))
    return ids, torch.tensor(positions)


def states_at(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    """The last hidden states at the flat ``positions`` that :func:`collate` gives with ``ids``, [positions, hidden]."""
    states: Tensor = model.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)[positions]
    return states


def log_probabilities(model: Any, states: Tensor) -> Tensor:
    """Of every token of the vocabulary, float32 [positions, vocabulary]."""
    return torch.log_softmax(model.get_output_embeddings()(states).float(), dim=-1)
