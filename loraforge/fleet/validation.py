"""Greedy validation of a merged model, by the stop rule and metrics that lm-eval applies to the test split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from loraforge.quality import metrics


@torch.no_grad()
def generate(
    model: Any, tokenizer: Any, prompts: Sequence[str], *, max_new_tokens: int, batch_size: int = 256
) -> list[str]:
    """Greedy continuations of ``prompts`` up to the first newline or end token, in the order given.

    Prompts are batched by length and padded on the left, so that every row's next token is the last column.
    """
    encoded = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"]
    stops = [tokenizer.eos_token_id, *(newline if len(newline) == 1 else [])]
    texts = [""] * len(encoded)
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        width = max(len(encoded[i]) for i in rows)
        ids = torch.full((len(rows), width), tokenizer.pad_token_id)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        for row, i in enumerate(rows):
            ids[row, width - len(encoded[i]) :] = torch.tensor(encoded[i])
            mask[row, width - len(encoded[i]) :] = 1
        generated = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=stops,
            pad_token_id=tokenizer.pad_token_id,
        )
        for i, tokens in zip(rows, generated[:, width:].tolist(), strict=True):
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            texts[i] = text.split("\n", 1)[0]
    return texts


def score(
    model: Any, tokenizer: Any, records: Sequence[Mapping[str, str]], *, metric: str, max_new_tokens: int
) -> float:
    """Score in percent of greedy answers to ``records`` (``prompt``, ``target``)."""
    answers = generate(
        model, tokenizer, [record["prompt"] for record in records], max_new_tokens=max_new_tokens
    )
    stats = [
        metrics.per_example(metric, answer, record["target"])
        for answer, record in zip(answers, records, strict=True)
    ]
    return metrics.aggregate(metric, stats)
