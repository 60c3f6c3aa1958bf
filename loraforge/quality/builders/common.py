"""What a task is, how its examples are split, and how a split is written.

The split depends on nothing but the examples as a set: ranks are SHA-256 digests, so neither input order nor
a random seed has a say, and a rebuild from the same archive gives the same bytes.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from loraforge.errors import InputError
from loraforge.files import write_jsonl
from loraforge.quality.builders.sources import DEFAULT_CACHE, Source, fetch

Family = Literal["classification", "rewriting", "extraction", "morphology", "knowledge"]
Metric = Literal["exact_match", "chrf", "field_f1"]

SPLITS = ("train", "validation", "test")
HELD_OUT = 200  # examples in test, and in validation where the pool allows
SMALL_HELD_OUT = 100
SMALL_POOL = 1000  # a pool below this has the small validation split
TRAIN_CAP = 8000


@dataclass(frozen=True)
class Example:
    """One prompt and its target, each without surrounding blanks; the model continues with ``" " + target``.

    ``item`` is the underlying thing (lemma, verb, entity) that must not be in two splits.
    """

    prompt: str
    target: str
    item: str


@dataclass(frozen=True)
class TaskSpec:
    """A task: where its data comes from and how examples are made of it.

    Parameters
    ----------
    max_gen_toks: tokens that evaluation lets the model generate; targets must fit.
    examples: makes examples from the unpacked folders, given by source name.
    max_per_class: at most this many examples of one target, for tasks whose classes are uneven.
    held_out_per_item, train_per_item: at most this many examples of one item in test and validation, and in
        train, for variety.
    """

    name: str
    family: Family
    metric: Metric
    max_gen_toks: int
    title: str
    sources: tuple[Source, ...]
    licence: str
    attribution: str
    examples: Callable[[Mapping[str, Path]], Iterable[Example]]
    max_per_class: int | None = None
    held_out_per_item: int = 3
    train_per_item: int = 12


def one_line(text: str, limit: int | None = None) -> str:
    """Collapse every run of white space to one blank; cut at the last word that ends within ``limit`` characters."""
    line = " ".join(text.split())
    if limit is None or len(line) <= limit:
        return line
    head = line[: limit + 1]
    return head.rsplit(" ", 1)[0] if " " in head else line[:limit]


def prompt_of(instruction: str, *fields: tuple[str, str], answer: str) -> str:
    """The prompt format of every task: an instruction, ``Name: value`` lines, and ``Answer:`` left open."""
    return "\n".join([instruction, *(f"{name}: {one_line(value)}" for name, value in fields), f"{answer}:"])


def split(spec: TaskSpec, examples: Iterable[Example]) -> dict[str, list[Example]]:
    """Split examples into train, validation and test, no item in two of them.

    Prompts with more than one target are dropped, duplicates kept once. Items are ranked by SHA-256: the first
    fill test (200 examples), the next validation (200, or 100 from a pool under 1000), the rest train (at most
    8,000). Raises InputError where the pool is too small for that.
    """
    pool = _cap_classes(spec, _unambiguous(examples))
    by_item: dict[str, list[Example]] = defaultdict(list)
    for example in pool:
        by_item[example.item].append(example)
    items = sorted(by_item, key=lambda item: _rank(spec.name, item))
    room = {
        "test": HELD_OUT,
        "validation": HELD_OUT if len(pool) >= SMALL_POOL else SMALL_HELD_OUT,
        "train": TRAIN_CAP,
    }
    splits: dict[str, list[Example]] = {name: [] for name in SPLITS}
    remaining = iter(items)
    for name, size in room.items():
        per_item = spec.train_per_item if name == "train" else spec.held_out_per_item
        chosen = splits[name]
        while len(chosen) < size and (item := next(remaining, None)) is not None:
            ranked = sorted(by_item[item], key=lambda example: _rank(spec.name, example.prompt))
            chosen += ranked[: min(per_item, size - len(chosen))]
    if len(splits["train"]) < SMALL_HELD_OUT:
        raise InputError(
            f"{len(pool)} examples of {len(items)} items are too few to split",
            key=spec.name,
            remedy="the source package has changed; look at its builder",
        )
    return {name: sorted(chosen, key=lambda e: _rank(spec.name, e.prompt)) for name, chosen in splits.items()}


def build(spec: TaskSpec, cache: Path = DEFAULT_CACHE) -> dict[str, list[Example]]:
    """Fetch the sources of a task and split its examples. Raises as ``sources.fetch`` and :func:`split`."""
    folders = {source.name: fetch(source, cache) for source in spec.sources}
    return split(spec, spec.examples(folders))


def records(spec: TaskSpec, examples: Sequence[Example]) -> list[dict[str, Any]]:
    """The JSON Lines records of a split: ``id``, ``prompt``, ``target``, ``item``."""
    return [
        {
            "id": f"{spec.name}-{_rank(spec.name, example.prompt)[:12]}",
            "prompt": example.prompt,
            "target": example.target,
            "item": example.item,
        }
        for example in examples
    ]


def write_task(spec: TaskSpec, out: Path, cache: Path = DEFAULT_CACHE) -> dict[str, int]:
    """Write ``train.jsonl``, ``validation.jsonl`` and ``test.jsonl`` to a folder; returns their lengths."""
    splits = build(spec, cache)
    for name, examples in splits.items():
        write_jsonl(out / f"{name}.jsonl", records(spec, examples))
    return {name: len(examples) for name, examples in splits.items()}


def _rank(task: str, text: str) -> str:
    return hashlib.sha256(f"{task}\0{text}".encode()).hexdigest()


def _unambiguous(examples: Iterable[Example]) -> list[Example]:
    """One example a prompt, in prompt order; prompts with several targets and empty texts are dropped."""
    by_prompt: dict[str, set[Example]] = defaultdict(set)
    for raw in examples:
        example = Example(raw.prompt.strip(), one_line(raw.target), raw.item)
        if example.prompt and example.target:
            by_prompt[example.prompt].add(example)
    return [
        min(same, key=lambda example: example.item)
        for _, same in sorted(by_prompt.items())
        if len({example.target for example in same}) == 1
    ]


def _cap_classes(spec: TaskSpec, pool: list[Example]) -> list[Example]:
    if spec.max_per_class is None:
        return pool
    by_target: dict[str, list[Example]] = defaultdict(list)
    for example in sorted(pool, key=lambda example: _rank(spec.name, example.prompt)):
        by_target[example.target].append(example)
    return [example for same in by_target.values() for example in same[: spec.max_per_class]]
