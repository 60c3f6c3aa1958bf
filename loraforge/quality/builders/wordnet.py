"""Tasks of WordNet 3.0: the broad category of a definition, and antonyms. Its file format is in wndb(5WN)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from loraforge.quality.builders.common import Example, TaskSpec, prompt_of
from loraforge.quality.builders.sources import Source

_WORDNET = Source(
    "debian",
    "wordnet-base",
    "1:3.0-37",
    "61060d960f9ada8fa120872312eccd3ecebfbab8c4579e4f5a74e1cf67620752",
    "LicenseRef-WordNet-3.0",
    "usr/share/doc/wordnet-base/copyright",
)
_ATTRIBUTION = "WordNet 3.0, © 2006 Princeton University."

# Lexicographer files of nouns (lexnames(5WN)); 03, the roots of the hierarchy, is no category.
_CATEGORIES = {
    4: "act",
    5: "animal",
    6: "artifact",
    7: "attribute",
    8: "body",
    9: "cognition",
    10: "communication",
    11: "event",
    12: "feeling",
    13: "food",
    14: "group",
    15: "location",
    16: "motive",
    17: "object",
    18: "person",
    19: "phenomenon",
    20: "plant",
    21: "possession",
    22: "process",
    23: "quantity",
    24: "relation",
    25: "shape",
    26: "state",
    27: "substance",
    28: "time",
}
_PARTS = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}


@dataclass(frozen=True)
class _Synset:
    offset: str
    lexname: int
    words: tuple[str, ...]
    antonyms: tuple[tuple[int, str, int], ...]  # own word (from 0), synset offset, its word (from 0)
    definition: str


def _synsets(path: Path) -> Iterator[_Synset]:
    """The synsets of a ``data.*`` file; lines that begin with blanks are the licence."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            continue
        record, gloss = line.split(" | ", 1)
        fields = record.split()
        word_count = int(fields[3], 16)
        first_pointer = 5 + 2 * word_count
        pointers = [
            fields[at : at + 4]
            for at in range(first_pointer, first_pointer + 4 * int(fields[first_pointer - 1]), 4)
        ]
        yield _Synset(
            offset=fields[0],
            lexname=int(fields[1]),
            words=tuple(
                re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in fields[4 : first_pointer - 1 : 2]
            ),
            antonyms=tuple(
                (int(words[:2], 16) - 1, offset, int(words[2:], 16) - 1)
                for symbol, offset, _, words in pointers
                if symbol == "!"
            ),
            definition=gloss.split('; "')[0].strip(),
        )


def _categories(folders: Mapping[str, Path]) -> Iterator[Example]:
    for synset in _synsets(folders["wordnet-base"] / "usr/share/wordnet/data.noun"):
        if synset.lexname in _CATEGORIES and 15 <= len(synset.definition) <= 220:
            prompt = prompt_of("Which category?", ("Definition", synset.definition), answer="Category")
            yield Example(prompt, _CATEGORIES[synset.lexname], synset.offset)


def _senses(path: Path) -> dict[str, list[str]]:
    """Offsets of each lemma's synsets in an ``index.*`` file, the most frequent sense first."""
    senses: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith(" "):
            fields = line.split()
            senses[fields[0].replace("_", " ")] = fields[-int(fields[2]) :]
    return senses


def _antonyms(folders: Mapping[str, Path]) -> Iterator[Example]:
    """Both directions of each pair of opposites.

    A word stays in one pair, that of its most frequent senses, so that no word is in two splits.
    """
    dictionary = folders["wordnet-base"] / "usr/share/wordnet"
    ranked: list[tuple[int, str, str, str]] = []
    for part, name in _PARTS.items():
        synsets = {synset.offset: synset for synset in _synsets(dictionary / f"data.{part}")}
        senses = _senses(dictionary / f"index.{part}")
        for synset in synsets.values():
            for own, offset, other in synset.antonyms:
                first, second = synset.words[own], synsets[offset].words[other]
                if first < second:
                    rank = senses[first.lower()].index(synset.offset) + senses[second.lower()].index(offset)
                    ranked.append((rank, first, second, name))
    used: set[str] = set()
    for _, first, second, name in sorted(ranked):
        if used.isdisjoint((first.lower(), second.lower())):
            used |= {first.lower(), second.lower()}
            for word, opposite in ((first, second), (second, first)):
                prompt = prompt_of(
                    "Give the opposite.", ("Word", word), ("Part of speech", name), answer="Opposite"
                )
                yield Example(prompt, opposite, f"{first} / {second}")


SPECS: tuple[TaskSpec, ...] = (
    TaskSpec(
        name="wn_supersense",
        family="classification",
        metric="exact_match",
        max_gen_toks=6,
        title="Broad category of a noun from its definition (25 categories)",
        sources=(_WORDNET,),
        licence="LicenseRef-WordNet-3.0",
        attribution=_ATTRIBUTION,
        examples=_categories,
        max_per_class=400,
    ),
    TaskSpec(
        name="wn_antonym",
        family="knowledge",
        metric="exact_match",
        max_gen_toks=16,
        title="Opposite of a word",
        sources=(_WORDNET,),
        licence="LicenseRef-WordNet-3.0",
        attribution=_ATTRIBUTION,
        examples=_antonyms,
    ),
)
