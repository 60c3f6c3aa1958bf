"""The real ``smol`` fleet, its compressed export and real prompts, for the test of both engines on a GPU, and by how
much two executions of one adapter may differ.

Tolerance: both executions are in BF16, which alone moves the log-probabilities of these answers by 0.02 on average, by
0.1 for the worst adapter and by 0.6 at most, and parts one answer in six at a near tie (on a processor, with all
adapters and kinds of prompts: transformers in BF16 against FP32, and the plugin in one engine against the other). So a
token that both choose may differ by 1 in its log-probability, by 0.2 on average over an adapter's answers, and by 0.05
over all; where they choose two different ones, either must find its own no more than 1 likelier than the other's, and
what follows is of another text and not compared; and two answers in three are equal token by token. Adapters move
log-probabilities by more than four times as much (the least by 8).
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_model import LENGTHS, Rows
from safetensors.torch import save_file

from loraforge.allocate.budget import parse_budget
from loraforge.compress import compress
from loraforge.export.layouts import pad_factors
from loraforge.fleet.peft_io import Adapter, open_adapter

Row = dict[str, Any]  # of Rows; also "top", the likeliest tokens of each place with their log-probabilities

BASE = Path(os.environ.get("LORAFORGE_BASE", "no base model given"))
CONFIG = Path(__file__).parents[2] / "config"
FLEET = sorted(path.parent for path in (CONFIG / "fleets" / "smol").glob("*/adapter_config.json"))
BUDGET, COMPRESSED = "1/4", "_1-4"  # what the name of a compressed adapter ends in
TOLERANCE, ON_AVERAGE, OVER_ALL, EQUAL = 1.0, 0.2, 0.05, 2 / 3
TOGETHER = 6  # tasks of a batch: each with its original adapter and its compressed one
SLOTS = 2 * TOGETHER  # of 48 adapters, so that each batch puts those of another out of theirs
BASE_ROWS = 4
OWN = "own"  # prompts as the task has them, beside those of LENGTHS
KINDS = (OWN, *LENGTHS)
MODES = ("native", "graphs", "eager")


def write_fleet(folder: Path, adapters: Sequence[Path] = FLEET) -> None:
    """Export the compressed adapters, and write ``plan.json``: what each mode serves by name, and batches by part, each
    row an adapter (None for the base model) and a prompt's token ids."""
    compress(adapters, parse_budget(BUDGET), folder / "compressed", cache=None)
    opened = [open_adapter(path) for path in adapters]
    original = {adapter.name: str(adapter.path) for adapter in opened}
    alike = {adapter.name: str(_at_one_rank(adapter, folder / "native")) for adapter in opened}
    compressed = {
        layout: {f"{name}{COMPRESSED}": str(folder / "compressed" / layout / name) for name in original}
        for layout in ("padded", "ragged")
    }
    plan = {
        "folders": {
            "native": {**alike, **compressed["padded"]},
            "graphs": {**original, **compressed["padded"]},
            "eager": {**original, **compressed["ragged"]},
        },
        "parts": _parts(list(original)),
    }
    (folder / "plan.json").write_text(json.dumps(plan))


def _at_one_rank(adapter: Adapter, folder: Path) -> Path:
    """The same adapter as the engines' own loaders read it: no rank of its own for a module, and no rsLoRA, which one
    of them passes over. Most are so already."""
    config = adapter.config
    if not config.get("rank_pattern") and not config.get("use_rslora"):
        return adapter.path
    rank = max(module.rank for module in adapter.modules)
    (scale,) = {module.scale for module in adapter.modules}
    tensors = {}
    with adapter.reader() as reader:
        for module in adapter.modules:
            factors = pad_factors(*reader.factors(module), rank)
            tensors |= dict(zip((module.a_name, module.b_name), map(torch.clone, factors), strict=True))
    stated = {
        "r": rank,
        "lora_alpha": scale * rank,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    (folder / adapter.name).mkdir(parents=True)
    save_file(tensors, folder / adapter.name / "adapter_model.safetensors")
    (folder / adapter.name / "adapter_config.json").write_text(json.dumps({**config, **stated}))
    return folder / adapter.name


def _parts(names: Sequence[str]) -> dict[str, list[tuple[str | None, list[int]]]]:
    """Batches of all adapters, of each kind of prompts (``KIND_NUMBER``); every batch for the base model alone too
    (``_base``); and, after all these, the first kind once more (``_again``)."""
    from tokenizers import Tokenizer

    tokens = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    parts: dict[str, list[tuple[str | None, list[int]]]] = {}
    for kind in KINDS:
        asked = {name: _prompt(tokens, name, None if kind == OWN else int(kind)) for name in names}
        for first in range(0, len(names), TOGETHER):
            tasks = names[first : first + TOGETHER]
            rows = [(name + end, asked[name]) for name in tasks for end in ("", COMPRESSED)]
            part = f"{kind}_{first // TOGETHER}"
            # the base model's rows stand between those of adapters
            plain = [(None, asked[name]) for name in tasks[:BASE_ROWS]]
            parts[part] = [*rows[:3], *plain[:2], *rows[3:], *plain[2:]]
            parts[f"{part}_base"] = [(None, prompt) for _, prompt in parts[part]]
    first = [part for part in batches_of(parts) if part.startswith(OWN)]
    return parts | {f"{part}_again": parts[part] for part in first}


def _prompt(tokens: Any, name: str, length: int | None) -> list[int]:
    """Token ids of a test prompt of a task; or of so many with their answers that the last ``length`` are left.
    tokens: the tokenizer."""
    lines = (CONFIG / "tasks" / name / "test.jsonl").read_text(encoding="utf-8").splitlines()
    asked, *shown = (json.loads(line) for line in lines)
    if length is None:
        return list(tokens.encode(asked["prompt"]).ids)
    text = asked["prompt"]
    for example in shown:
        ids: list[int] = tokens.encode(text).ids
        if len(ids) >= length:
            return ids[-length:]
        text = f"{example['prompt']} {example['target']}\n\n{text}"
    raise AssertionError(f"{name} has too few examples for {length} tokens")


def differences(one: Row, other: Row) -> list[float]:
    """By how much two answers to one prompt differ, token by token, to the first that they choose differently: there,
    by how much either prefers its own. A token that is not among those told of is infinitely far."""
    found = []
    for place, (mine, theirs) in enumerate(zip(one["tokens"], other["tokens"], strict=True)):
        if mine != theirs:
            return [*found, max(_preference(one, place, theirs), _preference(other, place, mine))]
        found.append(abs(one["logprobs"][place] - other["logprobs"][place]))
    return found


def _preference(row: Row, place: int, token: int) -> float:
    told = dict(row["top"][place])
    return float(row["logprobs"][place]) - float(told.get(token, -math.inf))


def check_alike(found: Rows, wanted: Rows) -> None:
    """Two executions answer alike, within the tolerance."""
    seen: dict[str | None, list[float]] = defaultdict(list)
    for one, other in zip(found, wanted, strict=True):
        seen[one["adapter"]] += differences(one, other)
    for adapter, apart in seen.items():
        assert max(apart) <= TOLERANCE, adapter
        assert statistics.fmean(apart) <= ON_AVERAGE, adapter
    assert statistics.fmean(each for apart in seen.values() for each in apart) <= OVER_ALL
    equal = sum(one["tokens"] == other["tokens"] for one, other in zip(found, wanted, strict=True))
    assert equal >= EQUAL * len(found)


def check_moved(found: Rows, base: Rows) -> None:
    """Every adapter changes some answer of the base model by far more than the tolerance."""
    moved: dict[str, float] = defaultdict(float)
    for one, alone in zip(found, base, strict=True):
        if one["adapter"] is not None:
            moved[one["adapter"]] = max(moved[one["adapter"]], *differences(one, alone))
    assert min(moved.values()) > 4 * TOLERANCE, min(moved, key=moved.__getitem__)


def rows_of(served: Mapping[str, Rows], kinds: Iterable[object] = KINDS, end: str = "") -> Rows:
    """Rows of all batches of some kinds; end: ``_base`` or ``_again``."""
    wanted = tuple(f"{kind}_" for kind in kinds)
    return [row for part in batches_of(served, end) if part.startswith(wanted) for row in served[part]]


def adapted(rows: Rows) -> Rows:
    """Those of adapters."""
    return [row for row in rows if row["adapter"] is not None]


def batches_of(served: Mapping[str, object], end: str = "") -> list[str]:
    """Parts that end so; without an end, those with adapters, of which none had a slot when they were served."""
    ends = ("_base", "_again")
    return [part for part in served if (part.endswith(end) if end else not part.endswith(ends))]
